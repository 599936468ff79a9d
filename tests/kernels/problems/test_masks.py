"""Masks become numbers that are added to scores: −∞ for a hidden key, and a float mask's own numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_kernels.problems.masks import added, outside
from tests.support.kernels.solving import normal


def test_a_mask_of_booleans_hides_by_minus_infinity() -> None:
    mask = normal(3, 5, 7) > 0
    expected = torch.zeros(3, 5, 7, device=mask.device).masked_fill(~mask, -torch.inf)
    assert torch.equal(added(mask), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_stay_as_they_are(dtype: torch.dtype) -> None:
    mask = normal(4, 9).to(dtype)
    mask[0, :3] = torch.tensor([-torch.inf, torch.nan, torch.finfo(dtype).max])
    actual = added(mask)
    assert actual.dtype == torch.float32
    finite = mask.double().clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    expected = torch.where(mask.isinf(), mask.double(), finite).float()
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(actual.isnan(), mask.isnan())


@given(left=st.integers(0, 12), right=st.integers(0, 12), offset=st.integers(-9, 9))
def test_a_window_hides_the_keys_that_are_too_far(left: int, right: int, offset: int) -> None:
    ahead = (torch.arange(9)[None] - torch.arange(7)[:, None] - offset).int()
    before = ahead.clone()
    expected = [[0.0 if -left <= n <= right else -torch.inf for n in row] for row in ahead.tolist()]
    assert torch.equal(outside(ahead, left, right), torch.tensor(expected))
    assert torch.equal(ahead, before), "the distances are unchanged"
