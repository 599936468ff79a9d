"""A reported cause of a failure explains more cases than the smallest one."""

from __future__ import annotations

import pytest
from torch import Tensor

import flashpoint_kernels
from tests.judge.corpus import RIGHT, WRONG


@pytest.mark.slow
def test_a_mistake_is_told_from_one_that_is_equal_in_the_smallest_case():
    """The judge tells a missing window from one without a right side, which are equal without keys to the left."""
    report = flashpoint_kernels.judge(WRONG["window_of_future"].function, quick=True, dtype="float32")
    assert [cause.code for cause in report.causes] == ["window-right"]


def wrong_with_two_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    o = RIGHT["formula_in_float32"](q, k, v, causal)
    return o * (1.25 if k.shape[2] < 3 else 1.0)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_no_cause_is_confirmed_by_cases_of_one_or_two_keys() -> None:
    """Cases of one or two keys confirm no cause, because too many mistakes give the same answers there."""
    report = flashpoint_kernels.judge(wrong_with_two_keys, quick=True, dtype="float32")
    assert report.verdict == "wrong"
    assert [cause.confirmed for cause in report.causes] == [False]
