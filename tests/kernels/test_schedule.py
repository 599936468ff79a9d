"""The cut of sequences into programs: complete, a pure function of each sequence's own shape, and heaviest first."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels.triton_backend.config import _INTERPRETER
from flashpoint_kernels.triton_backend.schedule import (
    Cut,
    Shape,
    block_rows,
    forward_list,
    forward_parts,
    gradient_parts,
    key_parts,
    query_parts,
    work_list,
)

shapes = st.builds(
    lambda q_rows, kv_rows, q_cut, kv_cut, left, right, bottom, group: Shape(
        q_rows - min(q_cut, q_rows),
        q_rows,
        kv_rows - min(kv_cut, kv_rows),
        kv_rows,
        (kv_rows - min(kv_cut, kv_rows)) - (q_rows - min(q_cut, q_rows)) if bottom else 0,
        left,
        right,
        group,
    ),
    st.one_of(st.integers(0, 12), st.integers(0, 200)),
    st.integers(0, 400),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([0, 3, 50, 1 << 30]),
    st.sampled_from([0, 5, 1 << 30]),
    st.booleans(),
    st.sampled_from([1, 2, 3, 8]),
)
CONFIG = _INTERPRETER


def test_blocks_follow_from_the_queries_and_the_group_alone() -> None:
    """At most `few_queries`: the least size that holds the queries of all heads of a group, else the largest."""
    few = CONFIG.few_queries

    def rows(queries: int, group: int) -> int:
        return block_rows(Shape(queries, queries, 9, 9, 0, 0, 0, group), CONFIG)

    assert [rows(1, group) for group in (1, 8, 16, 17, 32, 64)] == [16, 16, 16, 32, 32, 32]
    assert [rows(few, group) for group in (1, 2, 3)] == [16, 16, 32]
    assert rows(few + 1, 1) == rows(0, 1) == 0


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=6))
def test_how_a_sequence_is_cut_is_a_pure_function_of_its_own_shape(rows: list[Shape]) -> None:
    """Every visible key is in exactly one program, and the programs of a row never depend on its neighbours."""
    cuts = [Cut(CONFIG, size) for size in (0, *CONFIG.packed_rows)]
    for cut in cuts:
        tile = CONFIG.forward_of(cut.rows)
        items = work_list(tuple(rows), forward_parts, cut)
        for at, shape in enumerate(rows):
            mine = {tuple(item[1:]) for item in items.tolist() if item[0] == at}
            assert mine == {tuple(item) for item in forward_parts(shape, cut).items.tolist()}
            of_this_cut = block_rows(shape, CONFIG) == cut.rows
            blocks = range(0, shape.q_rows * (shape.group if cut.rows else 1), tile.block_m) if of_this_cut else ()
            assert {i0 for i0, *_ in mine} == set(blocks)
            for i0 in blocks:
                spans = sorted((a, b) for start, a, b, _ in mine if start == i0)
                assert spans[0][0] == 0
                assert spans[-1][1] == shape.kv_len
                assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
                assert all(a % tile.block_n == 0 for a, _ in spans)
        before = items.tolist()
        listed, merges, slots = forward_list(tuple(rows), cut)
        assert items.tolist() == before, "what is kept for later launches was written to"
        assert listed[:, :4].tolist() == items[:, :4].tolist()
        assert ((listed[:, 4] >= 0) == (items[:, 4] >= 0)).all()
        parts = zip(items.tolist(), listed[:, 4], strict=True)
        slot_of = {(row, i0, part): slot for (row, i0, _, _, part), slot in parts}
        merged = [(row, i0, part, first + part) for row, i0, first, n in merges.tolist() for part in range(n)]
        assert [slot for *_, slot in merged] == list(range(slots))
        assert {(row, i0, part): slot for row, i0, part, slot in merged} == {
            at: slot for at, slot in slot_of.items() if slot >= 0
        }
    lists = [(query_parts, CONFIG.delta), (key_parts, CONFIG.backward_kv), *((gradient_parts, cut) for cut in cuts)]
    for parts_of, tile_or_cut in lists:
        parts_of_row = [parts_of(row, tile_or_cut) for row in rows]
        cost = [int(parts_of_row[row].cost[list(parts_of_row[row].items[:, 0]).index(start)])
                for row, start in work_list(tuple(rows), parts_of, tile_or_cut).tolist()]  # fmt: skip
        assert cost == sorted(cost, reverse=True)
