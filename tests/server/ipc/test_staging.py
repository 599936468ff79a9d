"""A body fills a request's tensors at their places in the staging memory."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.http.body import MOST_AT_ONCE, BodyBuffer
from flashpoint_server.ipc.staging import ALIGNMENT, Layout, Pool, Staging
from flashpoint_server.refusal import Refusal

INPUTS = [
    ("q", TensorInfo("float32", (3, 5))),
    ("empty", TensorInfo("float32", (0, 4))),
    ("k", TensorInfo("bool", (7,))),
    ("v", TensorInfo("int64", (2,))),
    ("s", TensorInfo("float16", ())),
]
OUTPUTS = {"o": TensorInfo("float32", (3, 5)), "lse": TensorInfo("float32", (3,))}


@pytest.fixture
def pool():
    pool = Pool(64 << 20)
    yield pool
    pool.close()


@pytest.mark.parametrize("pieces", [1, 3, 7, 60, 61, 1000])
def test_every_tensor_is_whole_and_aligned_however_the_chunks_fall(pool, pieces):
    staging = Staging.take(pool, Layout.of(INPUTS, OUTPUTS))
    size = sum(info.nbytes for _, info in INPUTS)
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    places = BodyBuffer(staging.views(staging.inputs).values())
    assert places.left == size
    for start in range(0, size, pieces):
        assert not places.full
        places.copy(memoryview(data)[start : start + pieces])
    assert places.full
    assert places.filled_bytes == size
    at = 0
    for name, info in INPUTS:
        assert bytes(staging.views(staging.inputs)[name]) == data[at : at + info.nbytes]
        at += info.nbytes
    placed = [*staging.inputs.values(), *staging.outputs.values()]
    assert all(place.start % ALIGNMENT == 0 for place in placed)
    for before, after in itertools.pairwise(placed):
        assert before.start + before.size <= after.start
    assert [t.offset - staging.slot.offset for t in staging.described(staging.inputs)] == [
        place.start for place in staging.inputs.values()
    ]


def test_no_room_is_429_and_what_never_fits_is_413():
    pool = Pool(4 << 20)
    info = TensorInfo("float32", (1 << 18,))
    taken = [Staging.take(pool, Layout.of([("q", info)], {})) for _ in range(4)]
    for size, status in ((1 << 18, 429), (1 << 21, 413)):
        with pytest.raises(Refusal) as caught:
            Staging.take(pool, Layout.of([("q", TensorInfo("float32", (size,)))], {}))
        assert caught.value.status == status
    taken[0].release()
    Staging.take(pool, Layout.of([("q", info)], {}))


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
