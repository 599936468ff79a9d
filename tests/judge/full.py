"""Attention with every option, one step per method, so that a kernel can replace a single step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INF = math.inf


class Full:
    """The formula in float32. `at` (B|1, 1, n, 1) and `keys` (1, 1, 1, m) are the positions of queries and keys."""

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, attn_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, kv_lengths: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        n, m = q.shape[2], k.shape[2]
        self.q, self.n, self.m, self.bare, self.causal = q, n, m, not return_lse, causal
        k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        lengths = torch.full((1,), m) if kv_lengths is None else self.lengths(kv_lengths)
        lengths = lengths[:, None, None, None]
        at, keys = torch.arange(n)[:, None] + lengths - n, torch.arange(m)[None, None, None]
        s = self.capped(q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale), softcap)
        if alibi_slopes is not None:
            s = s - self.slopes(alibi_slopes)[..., None, None] * (keys - at).abs()
        seen = (keys < lengths) & self.visible(at, keys, causal, window)
        if attn_mask is not None:
            mask = self.mask(attn_mask)
            seen, s = (seen & mask, s) if mask.dtype == torch.bool else (seen, s + mask.float())
        s = self.hidden(s.masked_fill(~seen, -INF))
        if sinks is not None:
            s = torch.cat([s, self.sink(sinks.float())[:, None, None].expand(*s.shape[:-1], 1)], -1)
        dead = (s == -INF).all(-1, keepdim=True)
        p = self.softmax(s.masked_fill(dead, 0.0))
        o = self.output(self.dead(p, dead)[..., :m] @ v).to(q.dtype)
        return (o, s.logsumexp(-1)) if return_lse else o

    def lengths(self, lengths: Tensor) -> Tensor:
        return lengths

    def capped(self, s: Tensor, softcap: float) -> Tensor:
        return softcap * torch.tanh(s / softcap) if softcap else s

    def slopes(self, slopes: Tensor) -> Tensor:
        return slopes

    def visible(self, at: Tensor, keys: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        left, right = window
        seen = (keys <= at) if causal else keys >= 0
        seen = seen & (keys >= at - left) if left >= 0 else seen
        return seen & (keys <= at + right) if right >= 0 else seen

    def mask(self, mask: Tensor) -> Tensor:
        return mask

    def hidden(self, s: Tensor) -> Tensor:
        """Change the scores, in which hidden keys have -inf."""
        return s

    def sink(self, sinks: Tensor) -> Tensor:
        return sinks

    def softmax(self, s: Tensor) -> Tensor:
        return s.softmax(-1)

    def dead(self, p: Tensor, dead: Tensor) -> Tensor:
        """Return the weights, which rows without keys do not have."""
        return p.masked_fill(dead, 0.0)

    def output(self, o: Tensor) -> Tensor:
        return o


def full(steps: type[Full]) -> Callable[..., Any]:
    """Return the attention function with these steps."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, attn_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, kv_lengths: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        return steps().run(
            q, k, v, causal, scale, window, softcap, attn_mask, alibi_slopes, sinks, kv_lengths, return_lse
        )

    attention.__name__ = attention.__qualname__ = steps.__name__
    return attention


class Backward(torch.autograd.Function):
    """The identity, whose gradient a function changes."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(g), None


def changed(t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `t` with a gradient that `change` replaces."""
    return Backward.apply(t, change)  # type: ignore[no-untyped-call,no-any-return]
