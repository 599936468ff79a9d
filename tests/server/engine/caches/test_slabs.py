"""Full chunks of a cache's layer are adjacent in a slab, a larger block of memory, and are freed one by one."""

import ctypes
import mmap

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_contract.caches import CHUNK
from flashpoint_server.engine.caches.cache import Terms
from flashpoint_server.engine.caches.slabs import MOST_CHUNKS, Slab
from flashpoint_server.engine.caches.store import CacheStore
from flashpoint_server.engine.state.ledger import Ledger
from flashpoint_server.ipc.bodies import CacheShape

HEADS, D, DV = 2, 16, 16
ALICE = Terms("alice")
SHAPE = CacheShape((HEADS,), (D,), (DV,), "float32")


@pytest.fixture
def store():
    return CacheStore(Ledger(1 << 30), 100.0)


def create(store, **how):
    request = {"max_length": None, "keep": [None], "ttl": None, **how}
    (record,) = store.create(ALICE, SHAPE, 1, **request)
    return record.serial


def track_of(store, serial):
    (cache,) = store.find(ALICE, [serial])
    return cache.tracks[0]


def write(store, serial, count, at=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(HEADS, count, dim, generator=generator) for dim in (D, DV))
    store.write(ALICE, [serial], 0, None if at is None else [at], [(k, v)])
    return k, v


def adjacent(track):
    """Return the number of chunks of each adjacent run; assert that `Track.spans` has the addresses of all chunks."""
    spans = track.spans()
    numbers = (ctypes.c_int64 * (8 * len([c for c in track.chunks if c is not None]))).from_address(
        spans.of_sequence(0)
    )
    runs = []
    before = None
    for place, chunk in enumerate(c for c in track.chunks if c is not None):
        assert numbers[8 * place : 8 * place + 2] == [chunk.k.data_ptr(), chunk.v.data_ptr()]
        assert numbers[8 * place + 2 : 8 * place + 4] == [4 * chunk.capacity * D, 4 * chunk.capacity * DV]
        if (
            before is not None
            and chunk.slab is not None
            and (chunk.slab, chunk.place) == (before.slab, before.place + 1)
        ):
            runs[-1] += 1
        else:
            runs.append(1)
        before = chunk
    return runs


def test_what_is_written_at_once_is_adjacent_but_for_its_tail(store):
    serial = create(store)
    write(store, serial, 5 * CHUNK + 7)
    assert adjacent(track_of(store, serial)) == [5, 1]


def test_a_cache_that_grows_token_by_token_has_few_runs(store):
    serial = create(store)
    for start in range(0, 12 * CHUNK, 512):
        write(store, serial, 512, seed=start)
    assert adjacent(track_of(store, serial)) == [4, 4, 4]  # slabs with 4, 4 and 8 places
    assert MOST_CHUNKS >= 12


def test_forks_share_a_run_until_one_writes(store):
    serial = create(store)
    write(store, serial, 4 * CHUNK)
    (copy,) = [record.serial for record in store.fork(ALICE, [serial], None, [])]
    runs = adjacent(track_of(store, copy)), adjacent(track_of(store, serial))
    assert runs == ([4], [4])
    write(store, copy, 2 * CHUNK, at=2 * CHUNK + 1, seed=1)
    assert adjacent(track_of(store, copy)) == [2, 2, 1]
    assert adjacent(track_of(store, serial)) == [4]
    store.delete(ALICE, [serial])
    assert adjacent(track_of(store, copy)) == [2, 2, 1]


def test_reserved_memory_is_one_run_also_when_it_is_used_again(store):
    serial = create(store, max_length=4 * CHUNK)
    write(store, serial, 4 * CHUNK)
    assert adjacent(track_of(store, serial)) == [4]
    store.truncate(ALICE, serial, CHUNK)
    write(store, serial, 3 * CHUNK, seed=1)
    assert adjacent(track_of(store, serial)) == [4]


def test_dropped_chunks_give_their_memory_back_though_others_of_their_slab_stay(store):
    serial = create(store, keep=[CHUNK])
    write(store, serial, 6 * CHUNK)
    track = track_of(store, serial)
    gone = [track.chunks[place] for place in range(3)]
    write(store, serial, 1)
    assert track.first == 5 * CHUNK
    assert all(not chunk.k.any() and not chunk.v.any() for chunk in gone)  # freed memory reads as zero pages
    assert adjacent(track) == [1, 1]
    used = store.ledger.used
    store.truncate(ALICE, serial, 5 * CHUNK + 1)
    assert store.ledger.used < used


def test_a_place_is_taken_once_until_it_is_given_back():
    slab = Slab(mmap.PAGESIZE, torch.float32, 2)
    assert slab.take(0)
    assert slab.take(1)
    assert not slab.take(0)
    assert not slab.take(2)
    slab.whole.fill_(1.0)
    slab.give_back(0)
    assert not slab.whole[: slab.distance].any()
    assert slab.whole[slab.distance :].all()
    assert slab.take(0)


def test_where_there_is_no_room_beyond_it_a_chunk_has_a_slab_of_its_own(store, monkeypatch):
    class Narrow(Slab):
        def __init__(self, nbytes, dtype, room):
            if room > 1:
                raise MemoryError
            super().__init__(nbytes, dtype, room)

    monkeypatch.setattr("flashpoint_server.engine.caches.chunks.Slab", Narrow)
    serial = create(store)
    write(store, serial, 3 * CHUNK)
    assert adjacent(track_of(store, serial)) == [1, 1, 1]


def test_address_space_that_there_is_not_is_no_memory():
    with pytest.raises(MemoryError):
        Slab(1 << 46, torch.float32, 1 << 10)
