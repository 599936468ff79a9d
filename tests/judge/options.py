"""Wrong kernels whose mistake shows only with an option, or with an option and a size."""

# ruff: noqa: N801 (a class has the name of its kernel)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.judge.full import Full, changed, full
from tests.judge.tiled import collected

STEPS, CALLS, wrong = collected()


@wrong("mask", "mask-missing")
class mask_of_1024_keys(Full):
    """The mask hides nothing from key 1,024 on."""

    def mask(self, mask: Tensor) -> Tensor:
        if mask.shape[-1] <= 1024:
            return mask
        rest = torch.ones_like(mask[..., 1024:]) if mask.dtype == torch.bool else torch.zeros_like(mask[..., 1024:])
        return torch.cat([mask[..., :1024], rest], -1)


@wrong("mask", "nan")
class mask_of_first_tile(Full):
    """A row whose first 16 keys are hidden by a mask is NaN."""

    def hidden(self, s: Tensor) -> Tensor:
        if self.m <= 64:
            return s
        first = (s[..., :16] == -torch.inf).all(-1, keepdim=True) & (s > -torch.inf).any(-1, keepdim=True)
        return s.masked_fill(first & (not self.causal), torch.nan)


@wrong("mask", "empty-rows", "sentinel")
class mask_of_whole_rows(Full):
    """The output of a row that a mask hides is the mean of all values."""

    def mask(self, mask: Tensor) -> Tensor:
        self.masked = True
        return mask

    def dead(self, p: Tensor, dead: Tensor) -> Tensor:
        return p if getattr(self, "masked", False) and not self.causal else super().dead(p, dead)


@wrong("mask", "mask-batch")
class mask_of_first_sequence(Full):
    """A mask (B, 1, Sq, Sk) is read as (1, 1, Sq, Sk)."""

    def mask(self, mask: Tensor) -> Tensor:
        return mask[:1] if mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[2] > 1 else mask


@wrong("mask", "mask-head")
class mask_of_first_head(Full):
    """A mask (1, H, Sq, Sk) is read as (1, 1, Sq, Sk)."""

    def mask(self, mask: Tensor) -> Tensor:
        return mask[:, :1] if mask.ndim == 4 and mask.shape[0] == 1 else mask


@wrong("mask", "mask-missing")
class mask_of_decoding(Full):
    """With one query, the mask is ignored."""

    def mask(self, mask: Tensor) -> Tensor:
        plain = torch.ones_like(mask) if mask.dtype == torch.bool else torch.zeros_like(mask)
        return plain if self.n == 1 else mask


@wrong("mask", "mask-gradient")
class mask_gradient_of_one_head(Full):
    """The gradient of a mask that heads share has the part of one head."""

    def mask(self, mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool or mask.ndim < 4 or mask.shape[1] > 1:
            return mask
        return changed(
            mask.expand(-1, self.q.shape[1], -1, -1), lambda g: g * (torch.arange(g.shape[1]) < 1)[:, None, None]
        )


@wrong("mask", "mask-gradient")
class mask_gradient_scaled(Full):
    """The gradient of a mask is multiplied by the scale."""

    def mask(self, mask: Tensor) -> Tensor:
        return mask if mask.dtype == torch.bool else changed(mask, lambda g: g * self.q.shape[-1] ** -0.5)


@wrong("sinks", "sinks-gradient")
class sink_gradient_of_first_sequence(Full):
    """The gradient of sinks is halved."""

    def sink(self, sinks: Tensor) -> Tensor:
        return changed(sinks, lambda g: g / 2)


@wrong("sinks")
class sink_of_each_split(Full):
    """Beyond 512 keys, each of two splits adds the sink."""

    def sink(self, sinks: Tensor) -> Tensor:
        return sinks + 0.6931 if self.m > 512 else sinks


@wrong("sinks")
class sink_without_maximum(Full):
    """A sink above 4 is taken for 4."""

    def sink(self, sinks: Tensor) -> Tensor:
        return sinks.clamp_max(4)


@wrong("window", "window-offset", "window-missing", "window-left")
class window_of_decoding(Full):
    """With one query and more than 256 keys, the window is ignored."""

    def visible(self, at: Tensor, keys: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        return super().visible(at, keys, causal, (-1, -1) if self.n == 1 and self.m > 256 else window)


@wrong("window", "window-tile")
class window_of_whole_tiles(Full):
    """Beyond 1,024 keys, a window begins at a whole tile of 64 keys."""

    def visible(self, at: Tensor, keys: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        if self.m <= 1024 or window[0] < 0:
            return super().visible(at, keys, causal, window)
        first = (at - window[0]).div(64, rounding_mode="floor") * 64
        return super().visible(at, keys, causal, (-1, window[1])) & (keys >= first)


@wrong("alibi")
class slopes_of_32_heads(Full):
    """Heads from 32 on use the slopes of the heads from 0 on."""

    def slopes(self, slopes: Tensor) -> Tensor:
        return slopes[..., torch.arange(slopes.shape[-1]) % 32]


@wrong("alibi")
class own_slopes(Full):
    """The slopes are the usual ones, whatever the caller's."""

    def slopes(self, slopes: Tensor) -> Tensor:
        return torch.exp2(-8.0 * torch.arange(1, slopes.shape[-1] + 1) / slopes.shape[-1])


@wrong("kv-lengths", "input-ignored")
class lengths_of_whole_tiles(Full):
    """A length of keys is rounded up to a multiple of 16."""

    def lengths(self, lengths: Tensor) -> Tensor:
        return ((lengths + 15) // 16 * 16).clamp_max(self.m)


@wrong("softcap", "softcap-missing")
class softcap_of_decoding(Full):
    """With one query, the softcap is ignored."""

    def capped(self, s: Tensor, softcap: float) -> Tensor:
        return super().capped(s, 0.0 if self.n == 1 else softcap)


@wrong("softcap", "softcap-missing")
class softcap_with_mask(Full):
    """With a mask, the softcap is ignored."""

    def mask(self, mask: Tensor) -> Tensor:
        self.masked = True
        return mask

    def run(self, *arguments: Any) -> Any:
        values = list(arguments)
        values[6] = 0.0 if values[7] is not None else values[6]
        return super().run(*values)


@wrong("without-lse")
class path_without_lse(Full):
    """If lse is not requested, weights below 1e-2 are 0."""

    def dead(self, p: Tensor, dead: Tensor) -> Tensor:
        p = super().dead(p, dead)
        return p.where(p > 1e-2, 0.0) if self.bare else p


@wrong("without-lse", "causal-by-one")
class causal_without_lse(Full):
    """If lse is not requested, a causal mask shows the next key."""

    def visible(self, at: Tensor, keys: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        return super().visible(at + (self.bare and causal), keys, causal, window)


def _ragged(
    q: Tensor, k: Tensor, v: Tensor, ends_q: list[int], ends_k: list[int], causal: bool, scale: float | None
) -> Tensor:
    """Return attention of sequences q (total, H, D), each with the keys of its own place."""
    parts = []
    for n in range(len(ends_q) - 1):
        x = [t[a:b].transpose(0, 1)[None] for t, a, b in (
            (q, *ends_q[n : n + 2]), (k, *ends_k[n : n + 2]), (v, *ends_k[n : n + 2]),
        )]  # fmt: skip
        parts.append(Full().run(*x, causal, scale)[0].transpose(0, 1))
    return torch.cat(parts)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Take flash-attn's ragged sequences."""
    return _ragged(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), causal, softmax_scale)


@wrong("ragged")
def varlen_of_equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Sequence b begins at b times the mean length."""
    count = len(cu_seqlens_q) - 1
    ends = [[len(t) * n // count for n in range(count + 1)] for t in (q, k)]
    return _ragged(q, k, v, ends[0], ends[1], causal, None)


@wrong("ragged")
def varlen_causal_by_longest(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """The causal mask is aligned by the difference of the longest lengths."""
    parts, ends_q, ends_k = [], cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for n in range(len(ends_q) - 1):
        x = [t[a:b].transpose(0, 1)[None] for t, a, b in (
            (q, *ends_q[n : n + 2]), (k, *ends_k[n : n + 2]), (v, *ends_k[n : n + 2]),
        )]  # fmt: skip
        rows, keys = x[0].shape[2], x[1].shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(max_seqlen_k - max_seqlen_q) if causal else None
        parts.append(Full().run(*x, attn_mask=mask)[0].transpose(0, 1))
    return torch.cat(parts)


@wrong("ragged")
def varlen_gradient_of_longest(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """dk and dv of sequences shorter than the longest are 0."""
    lengths = cu_seqlens_k.diff().long()
    longest = (lengths == max_seqlen_k).repeat_interleave(lengths)[:, None, None]
    k, v = (changed(t, lambda g: g * longest) for t in (k, v))
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, causal)


def _dropped(q: Tensor, k: Tensor, v: Tensor, p: float, factor: float, other: bool) -> Tensor:
    """Drop weights; `other`: the backward draws another mask."""
    k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    weights = (q.float() @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    if p:
        kept, again = ((torch.rand(weights.shape) >= p) * factor for _ in range(2))
        weights = changed(weights, lambda g: g / kept.where(kept > 0, 1.0) * again) * kept if other else weights * kept
    return (weights @ v).to(q.dtype)


@wrong("dropout")
def dropout_unscaled(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Weights that dropout keeps are not multiplied by 1 / (1 - p)."""
    return _dropped(q, k, v, dropout_p, 1.0, False)


@wrong("dropout")
def dropout_of_the_backward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The backward drops other weights than the forward."""
    return _dropped(q, k, v, dropout_p, 1 / (1 - dropout_p), True)


@wrong("dropout")
def dropout_of_the_complement(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Weights are kept with probability p, not 1 - p."""
    return _dropped(q, k, v, 1 - dropout_p if dropout_p else 0.0, 1 / (1 - dropout_p), False)


def dropout(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Drop weights as the formula does."""
    return _dropped(q, k, v, dropout_p, 1 / (1 - dropout_p), False)


WRONG = {n: (full(steps), (steps.__doc__ or "").strip(), codes) for n, (steps, codes) in STEPS.items()} | {
    n: (call, (call.__doc__ or "").strip(), codes) for n, (call, codes) in CALLS.items()
}
