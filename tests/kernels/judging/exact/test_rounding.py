"""Units of rounding match the data types, and errors propagate through a maximum as autograd's gradients do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint_kernels.judging.exact.rounding import LARGEST, Maxima, rounded, unit_of
from flashpoint_kernels.problems.problem import DTYPES
from tests.support.kernels.solving import normal


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_unit_is_the_largest_relative_error_of_a_rounding(dtype: str) -> None:
    unit = unit_of(dtype)
    x = 1 + torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    error = ((rounded(x, DTYPES[dtype]) - x) / x).abs().max()
    assert error <= unit.u
    assert error > unit.u / 2 or dtype == "float64"
    assert unit.w == min(unit.u, 2.0**-24)
    assert (unit.half > 0) == (dtype in ("float16", "bfloat16"))
    least = torch.tensor(unit.tiny, dtype=torch.float64)
    assert torch.equal(rounded(least, DTYPES[dtype]), least)
    assert torch.tensor(LARGEST[dtype], dtype=torch.float64).to(DTYPES[dtype]).isfinite()


def test_only_float32_has_products_in_tf32() -> None:
    assert {dtype: unit_of(dtype, "tf32").tf32 for dtype in LARGEST} == {
        "float16": 0.0, "bfloat16": 0.0, "float32": 2.0**-10, "float64": 0.0,
    }  # fmt: skip
    assert unit_of("float32").tf32 == 0.0


@given(keys=st.integers(0, 150), seed=st.integers(0, 99), hidden=st.booleans())
@settings(max_examples=30, deadline=None)
def test_an_error_passes_through_the_maximum_of_the_row_and_of_each_tile(keys: int, seed: int, hidden: bool) -> None:
    """Errors propagate through the maxima of the row and of tiles of 16, 32, … keys as autograd's gradients do."""
    s = normal(2, keys, seed=seed).double().cpu()
    if hidden:
        s[:, ::3] = -torch.inf
    moved = normal(2, keys, seed=seed + 1).double().cpu().abs()
    actual = Maxima(s).through(moved)
    expected = torch.zeros_like(s)
    for j in range(keys):  # each key that raises the running maximum may get the errors of the whole row
        top = s[:, j] >= s[:, : j + 1].amax(-1)
        expected[:, j] = torch.where(top, moved.sum(-1), 0.0)
    tile = 16
    while tile < keys:
        leaf = s.clone().requires_grad_()
        for part, sums in zip(leaf.split(tile, -1), moved.split(tile, -1), strict=True):
            top = part.amax(-1)
            top[top > -torch.inf].backward(sums.sum(-1)[top > -torch.inf], retain_graph=True)
        assert leaf.grad is not None
        expected = torch.maximum(expected, leaf.grad)
        tile *= 2
    torch.testing.assert_close(actual, expected)
