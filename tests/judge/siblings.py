"""More wrong and right kernels, written after the judge: variants of those in `wrong` and `right`.

`python -m tests.judge.measure` judges these kernels like the rest of the corpus.
"""

# ruff: noqa: N801 (a class has the name of its kernel)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.judge.tiled import INF, Half, Tiled, collected, kernel

STEPS, CALLS, wrong = collected()


# The softmax and its sums


@wrong("low-precision-weights", "low-precision")
class short_polynomial(Tiled):
    """exp is 2^n times a parabola, with an error of 2e-3, as in software that replaces the special function unit."""

    def exp(self, x: Tensor) -> Tensor:
        y = x.clamp_min(-1e4) * math.log2(math.e)
        whole = y.floor()
        part = y - whole
        return torch.where(x > -INF, (1 + part * (0.6565 + 0.3435 * part)) * whole.exp2(), 0.0)


@wrong("low-precision", "low-precision-sum", "row-factor")
class short_reciprocal(Tiled):
    """1 / sum is computed in bfloat16."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        return torch.where(total > 0, acc * (1 / total).bfloat16().float(), 0.0)


@wrong("skipped-tiles", "skipped-weights")
class skipped_tiles(Tiled):
    """A row skips tiles whose largest score is more than 6 below its maximum so far, as sparse kernels do."""

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        s = super().scores(q, k, seen)
        top = s.amax(-1, keepdim=True)
        known = getattr(self, "top", torch.full_like(top, -INF))
        self.top = torch.maximum(known, top)
        return s.masked_fill(top < known - 6, -INF)


@wrong("low-precision-scores", "low-precision", "overflow")
class scores_in_float16(Tiled):
    """Scores, like all other products, are rounded to float16, whose largest number is 65,504."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).half().float()


@wrong("low-precision", "overflow", "low-precision-sum", "half-types", "bfloat16")
class through_float16(Tiled):
    """The output passes through float16: large values overflow, small ones vanish."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        return super().finish(acc, total).half().float()


@wrong("low-precision-sum", "low-precision")
class sum_in_float16(Tiled):
    """The sum of weights is rounded to float16 at each tile."""

    def rescale_sum(self, total: Tensor, by: Tensor) -> Tensor:
        return (total * by).half().float()


@wrong("no-maximum", "maximum-of-first-tile")
class maximum_over_heads(Tiled):
    """All heads and rows of a sequence use one maximum, so that weights of small scores underflow."""

    def maximum(self, s: Tensor, m: Tensor) -> Tensor:
        return super().maximum(s, m).amax((1, 2), keepdim=True).expand_as(m)


@wrong("clamped-exponent", "low-precision-scores", "softcap", "softcap-late")
class bounded_scores(Tiled):
    """Scores are bounded to [-100, 100] before the softmax."""

    def cap(self, s: Tensor) -> Tensor:
        return super().cap(s).clamp(-100, 100)


# Masks, shapes and tiles


@wrong("causal-alignment", "one-query", "causal", "causal-lengths")
class decode_sees_one(Tiled):
    """If there is one query, it is at position 0, so with causal it sees only key 0."""

    def offset(self, q_len: int, kv_len: int) -> int:
        return 0 if q_len == 1 else kv_len - q_len


@wrong("window-offset", "window")
class window_top_left(Tiled):
    """The window is aligned to the first key, the causal mask to the last one."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        window, self.window = self.window, (-1, -1)
        seen = super().visible(i, j)
        self.window = window
        rows = torch.arange(i.shape[0])[:, None]
        if window[0] >= 0:
            seen = seen & (j >= rows - window[0])
        return seen & (j <= rows + window[1]) if window[1] >= 0 else seen


@wrong("nan")
class first_tile_hidden(Tiled):
    """A row that sees no key of the first tile is NaN: exp(-inf - (-inf))."""

    def shift(self, m: Tensor) -> Tensor:
        return m


@wrong("key-tail", "key-missing", "causal", "last-tile", "causal-by-one")
class diagonal_tile_skipped(Tiled):
    """With causal, a query at a position from 64 on does not see the tile of 64 keys that contains this position."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        seen = super().visible(i, j)
        return seen & (j // 64 < i // 64) | (seen & (i < 64)) if self.causal else seen


@wrong("head-dim", "head-dim-tail")
class dims_by_32(Tiled):
    """A product over 40 or 80 elements, such as q kᵀ with this D, uses only those before the last multiple of 32."""

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        whole = a.shape[-1] // 32 * 32
        forward = a.shape[-1] in (16, 40, 80) and b.shape[-2] == a.shape[-1] and whole
        return a[..., :whole] @ b[..., :whole, :] if forward else a @ b


@wrong("group", "group-head", "group-order")
class group_of_two(Tiled):
    """Query head h uses key head h // 2, whatever the group's size."""

    def heads(self, t: Tensor, count: int) -> Tensor:
        return t[:, (torch.arange(count) // 2).clamp_max(t.shape[1] - 1)] if t.shape[1] < count else t


@wrong("batch", "batch-index")
class third_sequence(Tiled):
    """Sequence b reads the keys and values of sequence b % 2, so the third sequence reads those of the first."""

    def heads(self, t: Tensor, count: int) -> Tensor:
        return super().heads(t, count)[torch.arange(t.shape[0]) % 2]


# The backward


@wrong("low-precision-lse", "low-precision-gradient", "low-precision")
class lse_in_bfloat16(Tiled):
    """The backward reads lse in bfloat16."""

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return super().backward(do, q, k, v, o, lse.bfloat16().float())


@wrong("low-precision-gradient", "gradient-cancellation", "cancellation", "low-precision")
class delta_in_bfloat16(Tiled):
    """delta is rounded to bfloat16."""

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        return super().delta(o, do).bfloat16().float()


@wrong("gradient-factor", "gradient-scale", "backward-scale")
class default_scale_in_backward(Tiled):
    """The backward multiplies dq and dk by 1/sqrt(D), whatever the scale."""

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq * dq.shape[-1] ** -0.5, dk * dq.shape[-1] ** -0.5, dv


@wrong("group-gradient")
class last_of_group(Tiled):
    """dk and dv of a group have only the part of its last head, as if each head overwrote the one before."""

    def grouped(self, t: Tensor, like: Tensor) -> Tensor:
        return t.unflatten(1, (like.shape[1], -1))[:, :, -1]


@wrong("gradient-sink", "gradient-tile", "key-limit", "gradient-key-limit", "gradient-query-limit", "query-limit")
class queries_past_1024(Tiled):
    """dS of queries from 1,024 on is 0, so dk misses these queries, and their dq is 0."""

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        found = super().ds(p, dp, delta)
        return torch.cat([found[:, :, :1024], torch.zeros_like(found[:, :, 1024:])], 2)


@wrong("backward-causal-alignment", "backward-causal", "gradient-causal-lengths", "gradient-causal")
class top_left_backward(Tiled):
    """The backward's causal mask and window are aligned to the top left corner."""

    def back_seen(self, i: Tensor, j: Tensor) -> Tensor:
        return self.visible(i - i[0], j)


@wrong("empty-rows-gradient", "gradient-empty-rows")
class dead_rows_in_backward(Tiled):
    """Rows without keys have weights of 1 in dS, as if exp(-inf + inf) were 1."""

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        dead = p.sum(-1, keepdim=True) == 0
        return super().ds(torch.where(dead, 1.0, p), dp, delta)


# State, memory and types


def _right(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return kernel(Tiled)(q, k, v, causal)


_ROOM: dict[Any, Tensor] = {}


@wrong("state", "replay", "uninitialised", "second-backward", "aliasing")
def added_gradients(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """dq contains a buffer to which each backward adds, and which no call clears."""
    return _Added.apply(_right(q, k, v, causal), q)  # type: ignore[no-untyped-call,no-any-return]


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, q: Tensor) -> Tensor:
        ctx.key = q.shape, q.dtype
        return o.clone()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        kept = _ROOM.setdefault(ctx.key, torch.zeros(ctx.key[0], dtype=ctx.key[1]))
        before = kept.clone()
        kept.add_(do.mean())
        return do, before


@wrong("uninitialised", "race", "state")
def unwritten_tail(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Rows of the last, partial tile are left as torch.empty made them, if there is more than one tile."""
    o = _right(q, k, v, causal)
    actual, whole = torch.empty_like(o), o.shape[2] // 64 * 64
    return torch.where(torch.arange(o.shape[2])[:, None] < (whole or o.shape[2]), o, actual)


@wrong("race", "nondeterministic")
def order_of_sums(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """In float32, bits of the output differ between calls, as if partial sums were added in the order of arrival."""
    o = _right(q, k, v, causal)
    return o * (1 + 2.0**-23 * (torch.rand(()) < 0.5)) if o.dtype == torch.float32 else o


@wrong("race")
def gradient_race(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """dq is wrong by 0.5 in one backward of 25, as in a race."""
    return _Lossy.apply(_right(q, k, v, causal), q)  # type: ignore[no-untyped-call,no-any-return]


class _Lossy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, q: Tensor) -> Tensor:
        ctx.like = q
        return o.clone()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return do, torch.ones_like(ctx.like) * (0.5 if float(torch.rand(())) < 0.04 else 0.0)


@wrong("global-state", "state")
def seeds_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """torch's default data type is changed, and not restored."""
    torch.set_default_dtype(torch.float32 if q.dtype == torch.float32 else torch.bfloat16)
    return _right(q, k, v, causal)


@wrong("needs-input-grad", "gradient-missing")
def no_dv_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """dv is 0 if q requires no gradient."""
    if v.requires_grad and not q.requires_grad:
        return _right(q, k, v.detach(), causal) + 0.0 * v.sum().to(v.dtype)
    return _right(q, k, v, causal) if q.requires_grad else _right(q, k, v.detach(), causal)


@wrong("exception", "crash")
def raises_at_some(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Large values of q or k raise an error, although the function accepts other values in the same shapes."""
    if bool((q.abs() > 200).any()) or bool((k.abs() > 200).any()):
        raise RuntimeError("scores are too large")
    return _right(q, k, v, causal)


@wrong("grad-mode")
def other_path_for_inference(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """If no input requires a gradient, the output is 1% too large, as if another kernel ran."""
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return _right(q, k, v, causal)
    o = _right(q, k, v, causal)
    return o * 1.01


# Right kernels


class float32_weights_tile_32(Tiled):
    """Tiles have 32 keys, in reverse order if there is no mask: the order of keys is free."""

    tile = 32

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.causal or self.window != (-1, -1):
            return super().forward(q, k, v)
        return super().forward(q, k.flip(2), v.flip(2))


class scaled_queries(Half, Tiled):
    """q is multiplied by the scale in float32 before the product; exp2 replaces exp; P has the inputs' type."""

    def scaled(self, scale: float | None, dim: int) -> float:
        return super().scaled(scale, dim)

    def exp(self, x: Tensor) -> Tensor:
        return (x * math.log2(math.e)).exp2()

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return self.cap(self.dot(q * self.scale, k.mT)).masked_fill(~seen, self.hidden)


class large_sentinel(Tiled):
    """Hidden keys have a score of -1e38, and the output of rows without keys is set to 0."""

    hidden = -1e38

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        self.any = seen.any(-1, keepdim=True) | getattr(self, "any", False)
        return super().scores(q, k, seen)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = super().forward(q, k, v)
        return torch.where(self.any, o, 0.0), torch.where(self.any[..., 0] if lse.ndim == 3 else self.any, lse, -INF)


def softmax_of_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Products and P have the inputs' type, and torch's softmax runs in float32, as in eager models."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    n, m = s.shape[-2:]
    empty = (torch.arange(n) + m - n < 0)[:, None] if causal else torch.zeros(n, 1, dtype=torch.bool)
    if causal:
        s = s + torch.full((n, m), torch.finfo(s.dtype).min, dtype=s.dtype).triu(m - n + 1)
    p = s.masked_fill(empty, 0.0).softmax(-1, dtype=torch.float32).to(q.dtype)
    return (p @ v).masked_fill(empty, 0.0)


def flash_layout(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Take flash-attn's arguments and layout (batch, length, heads, D); return o, or (o, lse, None) if asked for."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = kernel(Tiled)(q, k, v, causal, softmax_scale, window_size, softcap).transpose(1, 2)
    if not return_attn_probs:
        return o
    with torch.no_grad():
        steps = Tiled(causal, softmax_scale, window_size, softcap, q.shape[-1])
        return o, steps.forward(q, k, v)[1][..., 0], None


def checks_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Accept only contiguous 16-bit inputs with D 64 or 128, and raise an error that says so for others."""
    if q.dtype == torch.float32:
        raise ValueError("float32 is not supported")
    if q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
        raise ValueError("the head dimension must be 64 or 128")
    if not all(t.is_contiguous() for t in (q, k, v)):
        raise ValueError("inputs must be contiguous")
    return _right(q, k, v, causal)


def compensated(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """All arithmetic is in float64, so the result is more exact than with float32."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q.double() @ k.mT * q.shape[-1] ** -0.5
    n, m = s.shape[-2:]
    seen = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else torch.ones(n, m, dtype=torch.bool)
    p = torch.nan_to_num(s.masked_fill(~seen, -INF).softmax(-1))
    return (p @ v).float().to(q.dtype)


def transposed_output(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Return o as a transposed view, as if a kernel had written (batch, length, heads, D)."""
    return _right(q, k, v, causal).transpose(1, 2).contiguous().transpose(1, 2)


def one_storage(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return o, or for `return_lse` and float32, o and lse as views of one new tensor."""
    o = _right(q, k, v, causal)
    if not return_lse or q.dtype != torch.float32:
        return o
    with torch.no_grad():
        lse = Tiled(causal, None, (-1, -1), 0.0, q.shape[-1]).forward(q, k, v)[1][..., 0]
    room = torch.cat([o.flatten(), lse.flatten()])
    return room[: o.numel()].view(o.shape), room[o.numel() :].detach().view(lse.shape)


def q_and_back(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Multiply q by 2 in its own memory, and restore its exact values."""
    with torch.no_grad():
        kept = q.clone()
        q.mul_(2)
        q.copy_(kept)
    return _right(q, k, v, causal)


def noisy_gradient(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The last bits of dq depend on the order of atomics: the judge reports this, but not as a failure."""
    return _Noise.apply(_right(_Noise.apply(q, True), k, v, causal), False)  # type: ignore[no-untyped-call,no-any-return]


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, noisy: bool) -> Tensor:
        ctx.noisy = noisy
        return t.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ends = torch.rand(g.shape) < 0.5
        unit = torch.finfo(g.dtype).eps / 2
        return (torch.where(ends, g, g * (1 + 2 * unit)) if ctx.noisy else g), None


def cached_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Keep a mask between calls, in a cache whose key has everything that the mask depends on."""
    n, m = q.shape[2], k.shape[2]
    seen = _ROOM.setdefault((n, m, causal), torch.ones(n, m, dtype=torch.bool).tril(m - n if causal else m))
    group = q.shape[1] // k.shape[1]
    s = (q.float() @ k.float().repeat_interleave(group, 1).mT) * q.shape[-1] ** -0.5
    p = torch.nan_to_num(s.masked_fill(~seen, -INF).softmax(-1))
    return (p @ v.float().repeat_interleave(group, 1)).to(q.dtype)


RIGHT: dict[str, Callable[..., Any]] = {
    each.__name__: kernel(each) for each in (float32_weights_tile_32, scaled_queries, large_sentinel)
} | {each.__name__: each for each in (
    softmax_of_torch, flash_layout, checks_shapes, compensated, transposed_output, one_storage, q_and_back,
    noisy_gradient, cached_mask,
)}  # fmt: skip
