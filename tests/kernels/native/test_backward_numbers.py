"""The gradient in C handles infinities, NaN and large numbers, and a row of dq has the same bits in any call."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import attention_backward
from tests.support.kernels.solving import forward, normal, qkv

TYPES = [torch.float32, torch.bfloat16, torch.float16]
ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # limits, relative to the largest value
LARGEST = torch.finfo(torch.float32).max


def seen_by(q_len: int, kv_len: int, causal: bool, window: tuple[int, int]) -> Tensor:
    distance = torch.arange(kv_len) - torch.arange(q_len)[:, None] - (kv_len - q_len)
    seen = distance <= (0 if causal else window[1] if window[1] >= 0 else kv_len + q_len)
    return seen & (distance >= -window[0]) if window[0] >= 0 else seen


@given(
    dtype=st.sampled_from(TYPES), q_len=st.sampled_from([1, 5, 70, 200]), kv_len=st.sampled_from([3, 64, 150, 300]),
    dim=st.sampled_from([16, 40, 64]), causal=st.booleans(), window=st.sampled_from([(-1, -1), (20, -1), (0, 0)]),
    mask=st.booleans(), bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]), of_key=st.sampled_from(["k", "v"]),
    of_query=st.sampled_from(["q", "do", ""]), place=st.integers(0, 1 << 20),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_infinity_and_nan_reach_nothing_that_does_not_see_them(
    dtype: torch.dtype, q_len: int, kv_len: int, dim: int, causal: bool, window: tuple[int, int], mask: bool,
    bad: float, of_key: str, of_query: str, place: int,
) -> None:  # fmt: skip
    t = qkv(1, 4, q_len, kv_len, dim, kv_heads=2, dtype=dtype)
    seen = seen_by(q_len, kv_len, causal, window)
    if mask:
        t["attn_mask"] = normal(q_len, kv_len, seed=3) > -0.3
        seen &= t["attn_mask"]
    options: dict[str, Any] = {"causal": causal, "window": window}
    t |= forward("tiled", t, **options)
    clean = attention_backward(**t, backend="tiled", **options)
    key, query = place % kv_len, place % q_len if of_query else None
    rows = seen[:, key].clone()
    if query is not None:
        rows[query] = True
    keys = seen[rows].any(0) if rows.any() else torch.zeros(kv_len, dtype=torch.bool)
    keys[key] = True
    t = {name: x.clone() for name, x in t.items()}
    t[of_key][:, :, key, place % dim] = bad
    if query is not None:
        t[of_query][:, :, query, place % dim] = bad
    for name in ("o", "lse"):
        t[name][:, :, rows] = torch.nan
    actual = attention_backward(**t, backend="cpu", **options)
    for right, one, reached in zip(clean, actual, (rows, keys, keys), strict=True):
        expected = right[:, :, ~reached]
        bound = ERROR[dtype] * max(1.0, float(right.abs().max()))
        assert torch.allclose(one[:, :, ~reached].double(), expected.double(), rtol=0, atol=bound)
    assert not actual[0][:, :, seen[:, key]].isfinite().all(-1).any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1.0, 1e10, 1e19, 1e30])
def test_finite_numbers_never_give_nan(dtype: torch.dtype, size: float) -> None:
    largest = 3e38 if dtype != torch.float16 else 6e4
    t = {
        name: (x * min(size, 1e3 if dtype == torch.float16 else size)).to(dtype)
        for name, x in qkv(1, 2, 70, 150, 32).items()
    }
    t["q"][0, 0, 3], t["k"][0, 0, 5], t["do"][0, 1, 3], t["v"][0, 1, 9] = largest, -largest, largest, largest
    for scale in (0.2, 3.0):
        for softcap in (0.0, 5.0):
            scores = ((t["q"].double() @ t["k"].double().mT).clamp(-LARGEST, LARGEST) * scale).clamp(-LARGEST, LARGEST)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            dtype_max = torch.finfo(dtype).max
            o = (scores.softmax(-1) @ t["v"].double()).clamp(-dtype_max, dtype_max).to(dtype)
            lse = scores.logsumexp(-1).clamp(-LARGEST, LARGEST).float()
            for grad in attention_backward(**t, o=o, lse=lse, backend="cpu", scale=scale, softcap=softcap):
                assert not grad.isnan().any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (40, 0)}, {"softcap": 3.0}])
def test_a_row_of_dq_has_the_same_bits_with_any_other_queries(dtype: torch.dtype, options: dict[str, Any]) -> None:
    t = qkv(1, 4, 300, 300, 40, kv_heads=2, dtype=dtype)
    t |= forward("cpu", t, **options)
    (whole,) = attention_backward(**t, backend="cpu", grads=["dq"], **options)
    for count in (1, 5, 33, 129):
        last = {name: x if name in "kv" else x[:, :, -count:] for name, x in t.items()}
        (some,) = attention_backward(**last, backend="cpu", grads=["dq"], **options)
        assert torch.equal(some, whole[:, :, -count:])
    one = {name: x[:, :1] if name in "kv" else x[:, 1:2] for name, x in t.items()}
    (alone,) = attention_backward(**one, backend="cpu", grads=["dq"], **options)
    assert torch.equal(alone, whole[:, 1:2])
