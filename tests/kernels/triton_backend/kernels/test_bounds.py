"""The ranges of keys and queries that compiled kernels compute equal those that Python computes."""

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flashpoint_kernels.problems import bounds as in_python
from flashpoint_kernels.triton_backend.kernels import bounds
from tests.conftest import DEVICE

CASES = [*itertools.product((0, 5, 17), (7, 9, 30), (-3, 0, 4), (0, 2, 1 << 30), (0, 1, 1 << 30), (0, 6, 20))]


@triton.jit
def both(cases, out, RANGE: tl.constexpr):
    """Call RANGE with the six arguments in each row of `cases`, and write its two results to `out`."""
    p = cases + tl.program_id(0) * 6
    lo, hi = RANGE(tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4), tl.load(p + 5))
    tl.store(out + tl.program_id(0) * 2, lo)
    tl.store(out + tl.program_id(0) * 2 + 1, hi)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("full_key_range", "query_range")),
        "key_range",
        "full_query_range",
    ],
)
def test_a_compiled_range_is_that_of_python(name: str) -> None:
    function: Any = getattr(bounds, name)
    cases = torch.tensor(CASES, dtype=torch.int32, device=DEVICE)
    out = torch.empty(len(CASES), 2, dtype=torch.int32, device=DEVICE)
    both[(len(CASES),)](cases, out, RANGE=function)
    assert out.tolist() == [list(getattr(in_python, name)(*case)) for case in CASES]
