"""The Triton kernels agree with float64, forward and backward, for any shape, strides and options."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashpoint_kernels import verify
from tests.support.kernels.triton_cases import FACTORS, options_of, possible, tensors_of

cases = st.fixed_dictionaries({name: st.sampled_from(levels) for name, levels in FACTORS.items()}).filter(possible)
lengths = st.integers(1, 80)


def restrided(t: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same values in other memory: a slice of wider rows, transposed, or at an odd address."""
    if how == "wide":
        return torch.nn.functional.pad(t, (3, 5))[..., 3 : 3 + t.shape[-1]]
    if how == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "odd":
        return torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(t.shape)
    return t


def agrees(case: dict[str, Any], q_len: int, kv_len: int, seed: int, strides: list[str]) -> None:
    tensors = tensors_of(case, q_len, kv_len, seed=seed)
    for name, how in zip(("q", "k", "v", "do"), strides, strict=True):
        tensors[name] = restrided(tensors[name], how)
    report = verify(tensors, options_of(case))
    assert report.backend == "triton"
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


patient = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.mark.full
@given(
    case=cases,
    q_len=lengths,
    kv_len=lengths,
    seed=st.integers(0, 2**20),
    strides=st.lists(st.sampled_from(["plain", "wide", "transposed", "odd"]), min_size=4, max_size=4),
)
@settings(max_examples=300, deadline=None, suppress_health_check=patient)
def test_any_problem(case: dict[str, Any], q_len: int, kv_len: int, seed: int, strides: list[str]) -> None:
    agrees(case, q_len, kv_len, seed, strides)
