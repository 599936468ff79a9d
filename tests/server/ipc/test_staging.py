"""Staging memory, which HTTP processes share with engines: its size classes, its limit, reuse, and reading into it."""

import contextlib
import itertools
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.http.body import MOST_AT_ONCE, BodyBuffer
from flashpoint_server.ipc.bodies import SLOT
from flashpoint_server.ipc.counts import Counts, WorkerGroup
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.ipc.staging import (
    ALIGNMENT,
    GROWTH,
    LARGEST,
    SMALLEST,
    Layout,
    Pool,
    PoolFullError,
    size_class,
)
from flashpoint_server.refusal import Refusal

INPUTS = [
    ("q", TensorInfo("float32", (3, 5))),
    ("empty", TensorInfo("float32", (0, 4))),
    ("k", TensorInfo("bool", (7,))),
    ("v", TensorInfo("int64", (2,))),
    ("s", TensorInfo("float16", ())),
]


OUTPUTS = {"o": TensorInfo("float32", (3, 5)), "lse": TensorInfo("float32", (3,))}


@pytest.mark.parametrize("pieces", [1, 3, 7, 60, 61, 1000])
def test_every_tensor_is_whole_and_aligned_however_the_chunks_fall(pool, pieces):
    job = Job.stage(pool, Layout.of(INPUTS, OUTPUTS))
    size = sum(info.nbytes for _, info in INPUTS)
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    places = BodyBuffer(job.views(job.inputs).values())
    assert places.left == size
    for start in range(0, size, pieces):
        assert not places.full
        places.copy(memoryview(data)[start : start + pieces])
    assert places.full
    assert places.filled_bytes == size
    at = 0
    for name, info in INPUTS:
        assert bytes(job.views(job.inputs)[name]) == data[at : at + info.nbytes]
        at += info.nbytes
    placed = [*job.inputs, *job.outputs]
    assert all(t.offset % ALIGNMENT == 0 for t in placed)
    assert (placed[0].offset, job.slot.offset % ALIGNMENT) == (0, 0)
    assert {t.segment for t in placed} == {SLOT}
    for before, after in itertools.pairwise(placed):
        assert before.offset + TensorInfo(before.dtype, before.shape).nbytes <= after.offset


def test_no_room_is_429_and_what_never_fits_is_413():
    pool = Pool(4 << 20)
    info = TensorInfo("float32", (1 << 18,))
    taken = [Job.stage(pool, Layout.of([("q", info)], {})) for _ in range(4)]
    for size, status in ((1 << 18, 429), (1 << 21, 413)):
        with pytest.raises(Refusal) as caught:
            Job.stage(pool, Layout.of([("q", TensorInfo("float32", (size,)))], {}))
        assert caught.value.status == status
    taken[0].release()
    Job.stage(pool, Layout.of([("q", info)], {}))


@given(st.lists(st.integers(0, 3 * MOST_AT_ONCE // 2), max_size=4), st.integers(0, 1000))
def test_what_is_discarded_touches_nothing_and_keeps_the_count(sizes, first):
    memory = [bytearray(size) for size in sizes]
    places = BodyBuffer(map(memoryview, memory))
    n = min(first, places.left)
    places.copy(memoryview(b"x" * n))
    before, left = [bytes(m) for m in memory], places.left
    places.discard()
    assert places.left == left
    while not places.full:
        place = places.next()
        place[:] = b"y" * len(place)
        places.filled(len(place))
    assert [bytes(m) for m in memory] == before
    assert places.filled_bytes == sum(sizes)


MIB = 1 << 20


def memory_files():
    """Return the number of staging segments that this process has open."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listdir's own descriptor is already closed
            if "flashpoint-staging" in os.readlink(f"/proc/self/fd/{fd}"):
                inodes.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return len(inodes)


@pytest.fixture
def pool():
    pool = Pool(64 * MIB)
    yield pool
    pool.close()


@given(st.integers(0, LARGEST))
def test_a_size_class_holds_what_it_is_for_and_wastes_at_most_half(size):
    class_size = size_class(size)
    assert class_size >= size
    assert class_size % ALIGNMENT == 0
    assert class_size == SMALLEST or class_size < 2 * size


def test_a_slot_let_go_is_taken_again_before_the_pool_grows(pool):
    first = pool.take(MIB)
    place = (first.segment.number, first.offset)
    first.release()
    again = pool.take(MIB - 5)
    assert (again.segment.number, again.offset) == place
    assert len(pool.segments) == 1
    again.release()
    assert pool.taken == 0


def test_a_slot_is_another_requests_only_when_every_holder_let_go(pool):
    slot = pool.take(MIB).hold()
    slot.release()
    others = [pool.take(MIB) for _ in range(8)]
    assert (slot.segment.number, slot.offset) not in {(o.segment.number, o.offset) for o in others}
    slot.release()
    assert (slot.segment, slot.offset) == ((last := pool.take(MIB)).segment, last.offset)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.booleans()), max_size=40))
def test_slots_never_overlap(requests):
    pool = Pool(256 * MIB)
    slots = []
    for size, keep in requests:
        slot = pool.take(size)
        assert slot.offset % ALIGNMENT == 0
        for other in slots:
            if other.segment is slot.segment:
                assert slot.offset + slot.size <= other.offset or other.offset + other.size <= slot.offset
        if keep:
            slots.append(slot)
        else:
            slot.release()
    pool.close()


def test_the_bound_holds_and_idle_segments_make_room_for_another_class():
    dropped = []
    pool = Pool(3 * GROWTH, dropped.append)
    small = [pool.take(SMALLEST) for _ in range(GROWTH // SMALLEST + 1)]  # these need two segments
    with pytest.raises(PoolFullError):
        pool.take(2 * GROWTH)
    for slot in small:
        slot.release()
    assert pool.take(2 * GROWTH).size == 2 * GROWTH
    assert sorted(dropped) == sorted({slot.segment.number for slot in small})
    pool.close()


def await_freed():
    """Wait for the threads that free large segments."""
    for thread in threading.enumerate():
        if thread.name == "free staging memory":
            thread.join()


def test_segments_are_closed_giants_at_once_and_the_rest_with_the_pool():
    before = memory_files()
    pool = Pool(4 * LARGEST)
    slots = [pool.take(100), pool.take(5 * MIB), pool.take(LARGEST + 1)]
    assert slots[2].size % mmap.PAGESIZE == 0
    assert memory_files() == before + 3
    slots[2].release()
    await_freed()
    assert memory_files() == before + 2
    pool.close()
    await_freed()
    assert memory_files() == before


def test_the_bound_holds_for_all_processes_and_unused_memory_makes_room_for_another():
    """The limit of staging memory holds for all processes together.

    If the pool of one process finds no memory, `make_room` of the others frees their unused memory.
    """
    memory = NamedMemory()
    one, two = (Pool(3 * GROWTH, counts=Counts(WorkerGroup(memory, n, 2))) for n in range(2))
    large, small = one.take(2 * GROWTH), one.take(SMALLEST)
    large.release()  # the pool keeps its segment
    one.make_room()  # frees nothing: no process has found the memory full
    with pytest.raises(PoolFullError, match=f"{3 * GROWTH} of {3 * GROWTH} bytes"):
        two.take(GROWTH)
    one.make_room()
    assert two.take(2 * GROWTH).size == 2 * GROWTH
    with pytest.raises(PoolFullError):
        two.take(GROWTH)
    small.release()
    one.close()
    assert two.take(GROWTH).size == GROWTH
    two.close()


def test_a_pool_starts_where_others_have_taken_all():
    memory = NamedMemory()
    one, two = (Pool(GROWTH, counts=Counts(WorkerGroup(memory, n, 2))) for n in range(2))
    one.take(GROWTH)
    two.warm()
    assert (two.taken, two.segments) == (0, {})
    one.close()
