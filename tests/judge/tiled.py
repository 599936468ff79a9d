"""Attention in tiles of keys, with one method for each step, so that a kernel can replace a single step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INF = math.inf
Kept = dict[str, tuple[Any, tuple[str, ...]]]


def collected() -> tuple[Kept, Kept, Callable[..., Any]]:
    """Return two dicts and a decorator, which adds classes to the first and functions to the second.

    The decorator's arguments are codes of causes that name the mistake; the judge may give any of them.
    """
    steps: Kept = {}
    calls: Kept = {}

    def wrong(*codes: str) -> Callable[[Any], Any]:
        def add(made: Any) -> Any:
            (steps if isinstance(made, type) else calls)[made.__name__] = made, codes
            return made

        return add

    return steps, calls, wrong


class Tiled:
    """FlashAttention 2 in PyTorch, in float32: an online softmax, and a backward that recomputes P from lse."""

    tile = 64
    start = -INF  # initial value of the running maximum
    hidden = -INF  # score of a hidden key

    def __init__(self, causal: bool, scale: float | None, window: tuple[int, int], softcap: float, dim: int) -> None:
        self.causal, self.window, self.softcap = causal, tuple(window), softcap
        self.scale = self.scaled(scale, dim)

    # Steps of the forward

    def scaled(self, scale: float | None, dim: int) -> float:
        return dim**-0.5 if scale is None else scale

    def cast(self, t: Tensor) -> Tensor:
        return t.float()

    def heads(self, t: Tensor, count: int) -> Tensor:
        return t.repeat_interleave(count // t.shape[1], 1)

    def ends(self, length: int) -> int:
        """Return how many of `length` keys the loop over tiles visits."""
        return length

    def offset(self, q_len: int, kv_len: int) -> int:
        return kv_len - q_len

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        """Return a mask of the keys j that the queries at positions i may see."""
        seen = j >= 0 if not self.causal else j <= i
        if self.window[0] >= 0:
            seen = seen & (j >= i - self.window[0])
        if self.window[1] >= 0:
            seen = seen & (j <= i + self.window[1])
        return seen.expand(i.shape[0], j.shape[1])

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def cap(self, s: Tensor) -> Tensor:
        return s if not self.softcap else self.softcap * torch.tanh(s / self.softcap)

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return self.cap(self.dot(q, k.mT) * self.scale).masked_fill(~seen, self.hidden)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def weights(self, p: Tensor, v: Tensor) -> Tensor:
        """Return the weights p in the form in which they are multiplied by v."""
        return p

    def maximum(self, s: Tensor, m: Tensor) -> Tensor:
        return torch.maximum(m, s.amax(-1, keepdim=True))

    def shift(self, m: Tensor) -> Tensor:
        return m.masked_fill(m == -INF, 0.0)

    def rescale(self, acc: Tensor, by: Tensor) -> Tensor:
        return acc * by

    def rescale_sum(self, total: Tensor, by: Tensor) -> Tensor:
        return total * by

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        return torch.where(total > 0, acc / total, 0.0)

    def lse(self, m: Tensor, total: Tensor) -> Tensor:
        return torch.where(total > 0, m + total.log(), -INF)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n, count = q.shape[2], q.shape[1]
        q, k, v = (self.cast(t) for t in (q, k, v))
        k, v = self.heads(k, count), self.heads(v, count)
        i = torch.arange(n)[:, None] + self.offset(n, k.shape[2])
        m = torch.full((*q.shape[:3], 1), self.start)
        total, acc = torch.zeros_like(m), torch.zeros(*q.shape[:3], v.shape[-1])
        length = self.ends(k.shape[2])
        for j in range(0, length, self.tile):
            to = min(j + self.tile, length)
            s = self.scores(q, k[:, :, j:to], self.visible(i, torch.arange(j, min(to, k.shape[2]))[None]))
            new = self.maximum(s, m)
            by, p = self.exp(m - self.shift(new)), self.exp(s - self.shift(new))
            total = self.rescale_sum(total, by) + p.sum(-1, keepdim=True)
            acc = self.rescale(acc, by) + self.dot(self.weights(p, v), v[:, :, j:to])
            m = new
        return self.finish(acc, total), self.lse(m, total)

    # Steps of the backward

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        return (o * do).sum(-1, keepdim=True)

    def cap_gradient(self, ds: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if not self.softcap:
            return ds
        return ds * (1 - torch.tanh(self.dot(q, k.mT) * self.scale / self.softcap) ** 2)

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        return p * (dp - delta)

    def back_seen(self, i: Tensor, j: Tensor) -> Tensor:
        return self.visible(i, j)

    def back_ends(self, length: int) -> int:
        return length

    def grouped(self, t: Tensor, like: Tensor) -> Tensor:
        return t.unflatten(1, (like.shape[1], -1)).sum(2)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq * self.scale, dk * self.scale, dv

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        like, n, count = k, q.shape[2], q.shape[1]
        q, k, v, o, do = (self.cast(t) for t in (q, k, v, o, do))
        k, v = self.heads(k, count), self.heads(v, count)
        i = torch.arange(n)[:, None] + self.offset(n, k.shape[2])
        delta = self.delta(o, do)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        length = self.back_ends(k.shape[2])
        for j in range(0, length, self.tile):
            to = min(j + self.tile, length)
            s = self.scores(q, k[:, :, j:to], self.back_seen(i, torch.arange(j, to)[None]))
            p = (s - lse.masked_fill(lse == -INF, 0.0)).exp()
            dp = self.dot(do, v[:, :, j:to].mT)
            ds = self.cap_gradient(self.ds(p, dp, delta), q, k[:, :, j:to])
            dv[:, :, j:to] = self.dot(self.weights(p, v).mT, do)
            dk[:, :, j:to] = self.dot(ds.mT, q)
            dq = dq + self.dot(ds, k[:, :, j:to])
        dq, dk, dv = self.gradients(dq, dk, dv)
        return dq, self.grouped(dk, like), self.grouped(dv, like)


class Half:
    """Steps of `Tiled` that round values to the inputs' type where FlashAttention 2 rounds them."""

    def weights(self, p: Tensor, v: Tensor) -> Tensor:
        return p.to(self.type).float() if self.type != torch.float32 else p  # type: ignore[attr-defined]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, steps: Tiled) -> Tensor:
        o, lse = steps.forward(q, k, v)
        o = o.to(q.dtype)
        ctx.steps = steps
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = ctx.steps.backward(do, q, k, v, o, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def kernel(steps: type[Tiled], only: str = "") -> Callable[..., Tensor]:
    """Return the attention function with these steps; with `only="half"`, float32 inputs use the right steps."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        chosen = Tiled if only == "half" and q.dtype == torch.float32 else steps
        made = chosen(causal, scale, window, softcap, q.shape[-1])
        made.type = q.dtype  # type: ignore[attr-defined]
        return _Attention.apply(q, k, v, made)  # type: ignore[no-untyped-call,no-any-return]

    attention.__name__ = attention.__qualname__ = steps.__name__ + ("_half" if only else "")
    return attention
