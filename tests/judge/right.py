"""Right kernels: ways to compute attention that the judge must not call wrong."""

# ruff: noqa: N801 (a class has the name of its kernel)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashpoint_kernels
from tests.judge.tiled import INF, Half, Tiled, kernel


def _visible(n: int, m: int, causal: bool) -> Tensor:
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    return (j <= i) if causal else torch.ones(n, m, dtype=torch.bool)


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    seen = _visible(q.shape[2], k.shape[2], causal)
    s = ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(~seen, -INF)
    s = s.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (s.softmax(-1) @ v) * seen.any(-1, keepdim=True)


def formula_in_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute softmax(q kᵀ · scale) v in float32."""
    return formula(q.float(), k.float(), v.float(), causal).to(q.dtype)


def formula_in_the_type(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute softmax(q kᵀ · scale) v with every step in the type of the inputs."""
    return formula(q, k, v, causal)


def formula_in_float64(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute softmax(q kᵀ · scale) v in float64."""
    return formula(q.double(), k.double(), v.double(), causal).to(q.dtype)


def _sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


def sdpa_math(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Call SDPA's math backend."""
    return _sdpa(SDPBackend.MATH, query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                 enable_gqa=enable_gqa)  # fmt: skip


def sdpa_flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Call SDPA's flash backend."""
    return _sdpa(SDPBackend.FLASH_ATTENTION, query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                 enable_gqa=enable_gqa)  # fmt: skip


def flex_eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """Call FlexAttention without torch.compile."""
    from torch.nn.attention.flex_attention import flex_attention

    offset = k.shape[2] - q.shape[2]

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j <= i + offset, s, -INF) if causal else s

    return flex_attention(q, k, v, score, scale=scale, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[return-value]


class online(Tiled):
    """An online softmax with tiles of 64 keys."""


class small_tiles(Tiled):
    """An online softmax with tiles of 16 keys."""

    tile = 16


class wide_tiles(Tiled):
    """An online softmax with tiles of 256 keys."""

    tile = 256


class half_weights(Half, Tiled):
    """The weights P are rounded to the type of v before they are multiplied by v."""


class exp_in_base_two(Tiled):
    """Weights are exp2 of the scores times log2(e)."""

    def exp(self, x: Tensor) -> Tensor:
        return (x * math.log2(math.e)).exp2()


class flash_attention_2(Half, Tiled):
    """FlashAttention 2's arithmetic: P and dS have the inputs' type, exp2 replaces exp, and tiles have 128 keys."""

    tile = 128

    def exp(self, x: Tensor) -> Tensor:
        return (x * math.log2(math.e)).exp2()

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return super().ds(p, dp, delta).to(self.type).float()  # type: ignore[attr-defined]


class skipped_rescale(Tiled):
    """The running maximum is replaced only by one larger by more than 8; the sums remain exact up to rounding."""

    def maximum(self, s: Tensor, m: Tensor) -> Tensor:
        new = super().maximum(s, m)
        return new.where((new - m > 8) | (m == -INF), m)


def split_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Compute attention over each half of the keys, and combine both results by their lse."""
    k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    seen, half = _visible(q.shape[2], k.shape[2], causal), k.shape[2] // 2
    s = ((q.float() @ k.mT) * q.shape[-1] ** -0.5).masked_fill(~seen, -1e38)
    parts = [(s[..., :half], v[:, :, :half], seen[:, :half]), (s[..., half:], v[:, :, half:], seen[:, half:])]
    sums = []
    for x, values, there in parts:
        if x.shape[-1]:
            m = x.amax(-1, keepdim=True)
            p = (x - m).exp() * there
            sums.append((m, p.sum(-1, keepdim=True), p @ values))
    m = torch.stack([each[0] for each in sums]).amax(0)
    total = sum(each[1] * (each[0] - m).exp() for each in sums)
    o = sum(each[2] * (each[0] - m).exp() for each in sums)
    return torch.where(total > 0, o / torch.where(total > 0, total, 1.0), 0.0).to(q.dtype)  # type: ignore[operator,call-overload]


def _ours(backend: str) -> Callable[..., Tensor]:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return flashpoint_kernels.attention(  # type: ignore[return-value]
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes,
            backend=backend,
        )  # fmt: skip

    attention.__name__ = attention.__qualname__ = f"ours_{backend}"
    return attention


ours_cpu = _ours("cpu")
ours_tiled = _ours("tiled")
ours_reference = _ours("reference")
ours_auto = flashpoint_kernels.attention

STEPS = (online, small_tiles, wide_tiles, half_weights, exp_in_base_two, flash_attention_2, skipped_rescale)
RIGHT: dict[str, Callable[..., Any]] = (
    {
        each.__name__: each
        for each in (
            formula_in_float32,
            formula_in_the_type,
            formula_in_float64,
            sdpa_math,
            sdpa_flash,
            flex_eager,
            split_keys,
        )
    }
    | {each.__name__: kernel(each) for each in STEPS}
    | {"ours_cpu": ours_cpu, "ours_tiled": ours_tiled, "ours_reference": ours_reference, "ours": ours_auto}
)
