"""In Triton's kernels, random sequences that share pages have the same bits as each sequence alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import DEVICE, EXPLORING, INTERPRETING
from tests.support.kernels.shared_pages import check

F8 = torch.float8_e4m3fn
UNIT = 1 if INTERPRETING else 16  # the interpreter's tiles have fewer keys than those of a GPU


@pytest.mark.slow
@given(
    keys=st.lists(st.tuples(st.sampled_from([0, 32, 64, 100, 128, 160]), st.integers(1, 80)), min_size=1, max_size=5),
    first=st.sampled_from([64, 160, 200]), page=st.sampled_from([16, 32, 48]), q_len=st.sampled_from([1, 1, 2]),
    group=st.sampled_from([1, 3, 4]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from([None, None, torch.int8, F8]), sinks=st.booleans(),
    options=st.sampled_from([{}, {}, {"softcap": 2.0}, {"window": (90 * UNIT, 0)}]),
)  # fmt: skip
@settings(max_examples=15 if EXPLORING else 6, deadline=None)
def test_sequences_of_a_tree_have_their_bits_in_triton(
    keys: list[tuple[int, int]], first: int, page: int, q_len: int, group: int, dtype: torch.dtype,
    kind: torch.dtype | None, options: dict[str, Any], sinks: bool,
) -> None:  # fmt: skip
    shared, own = ([pair[n] * UNIT for pair in keys] for n in range(2))
    more = {"sinks": torch.linspace(-1, 1, 2 * group, device=DEVICE)} if sinks else {}
    check([0, *shared], [first * UNIT, *own], page, q_len, group, dtype, kind, "triton", **options, **more)
