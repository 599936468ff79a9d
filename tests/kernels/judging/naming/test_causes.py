"""A reported cause explains all failing cases, because several causes may give equal answers in the smallest one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashpoint_kernels
from tests.judge.corpus import RIGHT, WRONG
from tests.judge.measure import SECONDS
from tests.judge.small import judged


@pytest.mark.slow
def test_a_mistake_is_told_from_one_that_is_equal_in_the_smallest_case():
    """The judge tells a window without a right bound from no window: only the window hides keys on the left."""
    report = flashpoint_kernels.judge(
        WRONG["window_of_future"].function, quick=True, dtype="float32", seed=0, seconds=SECONDS
    )
    assert [cause.code for cause in report.causes] == ["window-right"]


def wrong_with_two_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    o = RIGHT["formula_in_float32"](q, k, v, causal)
    return o * (1.25 if k.shape[2] < 3 else 1.0)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_no_cause_is_confirmed_by_cases_of_one_or_two_keys() -> None:
    """Cases of one or two keys confirm no cause, because too many mistakes give the same answers there."""
    report = flashpoint_kernels.judge(wrong_with_two_keys, quick=True, dtype="float32", seed=0, seconds=SECONDS)
    assert report.verdict == "wrong"
    assert [cause.confirmed for cause in report.causes] == [False]


def forward_with_noise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a right answer for large inputs, and noise on it for others. It has no gradient."""
    if q.requires_grad:
        raise NotImplementedError("forward only")
    o = RIGHT["formula_in_float32"](q, k, v)
    noise = torch.arange(o.numel(), dtype=torch.float64).mul(1.7).sin().mul(0.5).view(o.shape)
    return o + noise.to(o.dtype) * bool(q.abs().max() < 6)


def test_a_cause_does_not_name_what_all_judged_calls_have() -> None:
    report = judged(forward_with_noise)
    assert report.verdict == "wrong"
    assert report.causes
    assert all("no gradients are requested" not in cause.text for cause in report.causes)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 0 * (q.sum() + k.sum() + v.sum()) + torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)


@pytest.mark.slow
def test_zeros_of_both_signs_are_one_constant() -> None:
    report = flashpoint_kernels.judge(nothing, quick=True, dtype="float32", seed=0, seconds=SECONDS)
    assert [(cause.code, cause.text) for cause in report.causes] == [("constant", "o, dq, dk, dv are 0.0 everywhere")]


def loads_vectors(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Raise CUDA's error for a vector load if the address of q is not a multiple of 16."""
    if q.data_ptr() % 16:
        raise RuntimeError("CUDA error: misaligned address\nSearch for `cudaErrorMisalignedAddress' in the manual.")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.slow
def test_an_exception_in_one_relation_alone_is_named_by_the_relation() -> None:
    report = flashpoint_kernels.judge(loads_vectors, quick=True, dtype="float32", seed=0, seconds=SECONDS)
    (cause,) = report.causes
    assert (report.verdict, cause.code) == ("wrong", "alignment")
    expected = "inputs at an address that is not aligned: it raised RuntimeError: CUDA error: misaligned address"
    assert cause.text == expected
