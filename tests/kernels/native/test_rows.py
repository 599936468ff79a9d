"""The tiles of a sequence contain each query once, with all keys that it sees, and no key that no query sees."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_kernels.native.rows import CHUNK, SPAN, TILE, UNBOUNDED, ByteSteps, QuerySteps, Rows, Spans

STEPS = QuerySteps(ByteSteps(7, 100), ByteSteps(5, 60), ByteSteps(3, 4))


@given(
    queries=st.integers(1, 3000), group=st.sampled_from([1, 3, 8, 400]), keys=st.integers(0, 3000),
    left=st.sampled_from([0, 50, UNBOUNDED]), right=st.sampled_from([0, 9, UNBOUNDED]), mask=st.booleans(),
)  # fmt: skip
def test_tiles_have_each_query_once_and_the_keys_that_it_sees(
    queries: int, group: int, keys: int, left: int, right: int, mask: bool
) -> None:
    offset = keys - queries
    low, high = offset - left, offset + right + 1
    start = min(max(0, low), keys)
    stop = max(start, min(keys, high + queries - 1))
    rows = Rows(10_000, 20_000, 30_000, STEPS, queries, start, stop, 0, 16, low=low, high=high, offset=offset,
                mask=500 if mask else 0)  # fmt: skip
    tiles = [*rows.tiles(group, 11)]
    assert sum(tile.queries for tile in tiles) == queries
    first = 0
    for tile in tiles:
        assert len(tiles) == 1 or tile.queries == 1 or tile.queries * group <= TILE
        assert (tile.q, tile.o, tile.lse) == (10_000 + 100 * first, 20_000 + 60 * first, 30_000 + 4 * first)
        assert (tile.query, tile.offset) == (first, offset + first)
        assert tile.mask == (500 + 11 * first if mask else 0)
        assert start <= tile.start <= tile.stop <= stop
        for query in {first, first + tile.queries - 1}:
            seen = range(max(start, query + low), min(stop, query + high))
            assert not seen or tile.start <= seen.start < seen.stop <= tile.stop
            assert tile.low + (query - first) == query + low
        first += tile.queries
    assert rows.chunks == max(1, len({key // CHUNK for key in range(start, stop)}))


def test_a_span_has_eight_integers_and_each_sequence_its_own() -> None:
    numbers = np.arange(6 * 8, dtype=np.int64).reshape(6, 8)
    spans = Spans(numbers, 16, torch.float32, k_step=64, v_step=64, count=3)
    assert 8 * numbers.itemsize == SPAN
    assert spans.of_sequence(1) - spans.of_sequence(0) == 3 * SPAN
    assert spans.of_sequence(np.arange(2)).tolist() == [spans.of_sequence(n) for n in range(2)]
