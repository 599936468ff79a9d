"""The judge finds no fault in our kernels on each backend, and on a GPU none in those of torch and other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flashpoint_kernels
from flashpoint_contract.judging import Report
from flashpoint_kernels import available_backends
from tests.conftest import DEVICE
from tests.support.kernels.judged import OTHERS, OURS, SDPA, installed

ON_GPU = DEVICE == "cuda"
# The CPU runs one shape with all kinds of values; a GPU runs all cases of `quick`.
SHAPE = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 77, "head_dim": 64}
_FLOAT32_IN_TF32 = ("sdpa_efficient", "sdpa_cudnn")


def _judged(function: Callable[..., Any] | str, **more: Any) -> Report:
    given = {"seconds": 200.0, "timeout": 120.0} if ON_GPU else {"seconds": 400.0}
    return flashpoint_kernels.judge(function, quick=True, device=DEVICE, **(given | more))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", [pytest.param(n, marks=pytest.mark.slow if n == "reference" else []) for n in OURS])
def test_our_kernels_are_right(backend: str, causal: bool) -> None:
    if backend not in available_backends(DEVICE):
        pytest.skip(f"{backend} does not run on {DEVICE}")
    if backend == "triton" and not ON_GPU:
        pytest.skip("the interpreter would take minutes; make gpu judges it")
    only = SHAPE | {"causal": causal}
    report = _judged(OURS[backend], only=only, dtype=("float32", "bfloat16"), seed=int(causal))
    assert report.ok, "\n".join(report.lines())
    assert set(report.outputs) >= {"o", "lse", "dq", "dk", "dv"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", OURS)
def test_our_kernels_are_right_in_all_quick_cases(backend: str) -> None:
    if backend not in available_backends(DEVICE) or (backend == "triton" and not ON_GPU):
        pytest.skip(f"{backend} is not judged on {DEVICE}")
    report = _judged(OURS[backend], seed=7)
    assert report.ok, "\n".join(report.lines())
    assert report.race is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", SDPA)
def test_torchs_kernels_are_right(name: str) -> None:
    if not ON_GPU and name not in ("sdpa_flash", "sdpa_math"):
        pytest.skip("torch has it only for GPUs")
    report = _judged(SDPA[name], seed=3, precision="tf32" if name in _FLOAT32_IN_TF32 else "ieee")
    # On an H200, torch's fused kernels fail for inputs at an address that is not aligned.
    known = ON_GPU and {cause.code for cause in report.causes} == {"alignment"}
    assert report.verdict != "wrong" or known, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_other_packages_are_right(name: str) -> None:
    if not ON_GPU or not installed(OTHERS[name]):
        pytest.skip("it is not installed, or needs a GPU")
    report = _judged(OTHERS[name])
    assert report.verdict != "wrong", "\n".join(report.lines())
