"""The Triton kernels agree with float64, forward and backward, for any shape, strides and options."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.solving import check

DIMS = st.sampled_from([16, 24, 40, 64])
SIZES = Sizes(
    q_len=st.integers(1, 80), kv_len=st.integers(1, 80), dim=DIMS, value_dim=DIMS, kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
)  # fmt: skip
any_problem = problems(
    SIZES, backward=True, windows=((-1, -1), (20, 7), (0, 0)), slope=0.5,
    block_sizes=(None, (16, 16), (16, 48)),  # block edges are inside the interpreter's tiles, and tile edges in blocks
)  # fmt: skip


@pytest.mark.full
@given(problem=any_problem)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_problem(problem: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, options = problem
    check("triton", tensors, **options)
