"""How sequences are cut into programs: complete, a pure function of each one's own shape, and heaviest first."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels.triton_backend.config import _INTERPRETER
from flashpoint_kernels.triton_backend.schedule import (
    Shape,
    forward_list,
    forward_parts,
    key_parts,
    query_parts,
    work_list,
)

shapes = st.builds(
    lambda q_rows, kv_rows, q_cut, kv_cut, left, right, bottom: Shape(
        q_rows - min(q_cut, q_rows),
        q_rows,
        kv_rows - min(kv_cut, kv_rows),
        kv_rows,
        (kv_rows - min(kv_cut, kv_rows)) - (q_rows - min(q_cut, q_rows)) if bottom else 0,
        left,
        right,
    ),
    st.integers(0, 200),
    st.integers(0, 400),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([0, 3, 50, 1 << 30]),
    st.sampled_from([0, 5, 1 << 30]),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=6))
def test_how_a_sequence_is_cut_is_a_pure_function_of_its_own_shape(rows: list[Shape]) -> None:
    """Every visible key is in exactly one program, and the programs of a row never depend on its neighbours."""
    config = _INTERPRETER
    items = work_list(tuple(rows), forward_parts, config)
    for at, shape in enumerate(rows):
        mine = {tuple(item[1:]) for item in items.tolist() if item[0] == at}
        assert mine == {tuple(item) for item in forward_parts(shape, config).items.tolist()}
        assert {i0 for i0, *_ in mine} == set(range(0, shape.q_rows, config.forward.block_m))
        for i0 in range(0, shape.q_rows, config.forward.block_m):
            spans = sorted((a, b) for start, a, b, _ in mine if start == i0)
            assert spans[0][0] == 0
            assert spans[-1][1] == shape.kv_len
            assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
            assert all(a % config.forward.block_n == 0 for a, _ in spans)
    before = items.tolist()
    listed, merges, slots = forward_list(tuple(rows), config)
    assert items.tolist() == before, "what is kept for later launches was written to"
    assert listed[:, :4].tolist() == items[:, :4].tolist()
    assert ((listed[:, 4] >= 0) == (items[:, 4] >= 0)).all()
    slot_of = {(row, i0, part): slot for (row, i0, _, _, part), slot in zip(items.tolist(), listed[:, 4], strict=True)}
    merged = [(row, i0, part, first + part) for row, i0, first, n in merges.tolist() for part in range(n)]
    assert [slot for *_, slot in merged] == list(range(slots))
    assert {(row, i0, part): slot for row, i0, part, slot in merged} == {
        at: slot for at, slot in slot_of.items() if slot >= 0
    }
    for cut, tile in ((query_parts, config.backward_q), (key_parts, config.backward_kv)):
        cost = [int(cut(rows[row], tile).cost[list(cut(rows[row], tile).items[:, 0]).index(start)])
                for row, start in work_list(tuple(rows), cut, tile).tolist()]  # fmt: skip
        assert cost == sorted(cost, reverse=True)
