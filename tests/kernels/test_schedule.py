"""How sequences are cut into programs: complete, a pure function of each one's own shape, and heaviest first."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels.triton_backend.config import _INTERPRETER
from flashpoint_kernels.triton_backend.schedule import (
    Shape,
    assign_slots,
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
    items = work_list(rows, lambda shape: forward_parts(shape, config))
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
    merges, slots = assign_slots(items)
    taken = sorted(slot for *_, slot in items.tolist() if slot >= 0)
    assert taken == list(range(slots)) == [s for _, _, first, n in merges.tolist() for s in range(first, first + n)]
    for parts_of in (lambda s: query_parts(s, config.backward_q), lambda s: key_parts(s, config.backward_kv)):
        cost = [int(parts_of(rows[row]).cost[list(parts_of(rows[row]).items[:, 0]).index(start)])
                for row, start in work_list(rows, parts_of).tolist()]  # fmt: skip
        assert cost == sorted(cost, reverse=True)
