"""Right kernels of other signatures and arithmetic, which the judge must judge and must not blame."""

# ruff: noqa: N801 (a class has the name of its kernel)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.judge.full import Full, full
from tests.judge.options import dropout, varlen
from tests.judge.right import formula_in_the_type
from tests.judge.tiled import Half, Tiled, kernel


class every_option(Full):
    """The formula in float32, with each option."""


def packed(qkv: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    """Take q, k and v as one tensor (B, S, 3, H, D), as flash-attn does."""
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    return kernel(Tiled)(q, k, v, causal, softmax_scale).transpose(1, 2)


def packed_keys(q: Tensor, kv: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    """Take k and v as one tensor (B, S, 2, H, D)."""
    k, v = (t.transpose(1, 2) for t in kv.unbind(2))
    return kernel(Tiled)(q.transpose(1, 2), k, v, causal, softmax_scale).transpose(1, 2)


def varlen_packed(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """Take ragged q, k and v as one tensor (total, 3, H, D)."""
    return varlen(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, softmax_scale, causal)


def varlen_packed_keys(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Take ragged k and v as one tensor (total, 2, H, D)."""
    return varlen(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, causal)


def prefill(
    q: Tensor, k: Tensor, v: Tensor, custom_mask: Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Take FlashInfer's arguments: one sequence (length, heads, D), and lse in base 2."""
    x = [t.transpose(0, 1)[None] for t in (q, k, v)]
    o, lse = Full().run(*x, causal, sm_scale, (window_left, -1), logits_soft_cap or 0.0, return_lse=True)
    o, lse = o[0].transpose(0, 1), lse[0].mT * math.log2(math.e)
    return (o, lse) if return_lse else o


class bfloat16_sums(Half, Tiled):
    """The accumulator has the inputs' type at the end of each tile, and scores stay in float32."""

    def rescale(self, acc: Tensor, by: Tensor) -> Tensor:
        return (acc * by).to(self.type).float()  # type: ignore[attr-defined]


def dim_128_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Take only D 128, 16-bit types, and lengths that are multiples of 128."""
    if q.shape[-1] != 128 or v.shape[-1] != 128:
        raise ValueError("D must be 128")
    if q.dtype == torch.float32:
        raise ValueError("float32 is not supported")
    if q.shape[2] % 128 or k.shape[2] % 128:
        raise ValueError("lengths must be multiples of 128")
    return kernel(Tiled)(q, k, v, causal)


def square_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Take only as many queries as keys, and equal heads."""
    if q.shape[:3] != k.shape[:3]:
        raise ValueError("q and k must have equal lengths and heads")
    return kernel(Tiled)(q, k, v, causal)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return kernel(Tiled)(q, k, v, causal)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError("there is no backward")


def forward_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Have no gradient: the backward raises NotImplementedError."""
    return _Forward.apply(q, k, v, causal)  # type: ignore[no-untyped-call,no-any-return]


def one_sequence(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Take one sequence (length, heads, D)."""
    if q.ndim != 3:
        raise ValueError("q must be (length, heads, D)")
    return kernel(Tiled)(*(t.transpose(0, 1)[None] for t in (q, k, v)), causal)[0].transpose(0, 1)


def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Any:
    """Take a mask of any broadcast shape, with its gradient."""
    return Full().run(q, k, v, causal, attn_mask=attn_mask)


def bfloat16_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """Compute each step in the type of the inputs, with the scale rounded to it."""
    factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
    return formula_in_the_type((q * factor).to(q.dtype), k, v, causal)


RIGHT: dict[str, Callable[..., Any]] = {
    "every_option": full(every_option), "bfloat16_sums": kernel(bfloat16_sums), "varlen": varlen, "dropout": dropout,
} | {each.__name__: each for each in (
    packed, packed_keys, varlen_packed, varlen_packed_keys, prefill, dim_128_alone, square_alone, forward_alone,
    one_sequence, masked, bfloat16_scores,
)}  # fmt: skip
