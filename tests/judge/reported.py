"""Wrong kernels modelled on public reports of sizes and memory, on numerics, on state and on the context of a call."""

# ruff: noqa: N801 (a class has the name of its kernel)
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.judge.full import Full, changed
from tests.judge.tiled import Half, Tiled, collected, kernel

GROUPS = {group: collected() for group in ("sizes", "memory", "numerics", "state", "context")}


def _right(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: tuple[int, int] = (-1, -1)) -> Tensor:
    return kernel(Tiled)(q, k, v, causal, None, window)


# Sizes

wrong = GROUPS["sizes"][2]


@wrong("programs", "batch", "head")
class second_wave(Tiled):
    """From program 132 on, a persistent kernel adds the last tile of keys of the first program again."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        o = super().finish(acc, total)
        later = torch.arange(o.shape[0] * o.shape[1]).view(*o.shape[:2], 1, 1) >= 132
        return torch.where(later & (self.several > 0), o + o[:1, :1] / 4, o)

    several = 0

    def ends(self, length: int) -> int:
        self.several = int(length > self.tile)
        return length


@wrong("head-dim", "head-dim-tail")
class dim_72(Tiled):
    """With D 72, the last 8 dimensions of the output are 0."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        o = super().finish(acc, total)
        return o * (torch.arange(72) < 64) if o.shape[-1] == 72 else o


@wrong("head-dim", "head-dim-tail")
class dim_above_96(Tiled):
    """With D from 97 to 127, scores lack the dimensions from 96 on."""

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        top = 96 if 96 < q.shape[-1] < 128 else q.shape[-1]
        return super().scores(q[..., :top], k[..., :top], seen)


@wrong("one-query", "head-dim")
class decode_256(Tiled):
    """With one query and D 256, the second half of the output repeats the first."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        o = super().finish(acc, total)
        return o[..., :128].repeat(1, 1, 1, 2) if o.shape[-1] == 256 and o.shape[2] == 1 else o


@wrong("group", "group-head", "group-order")
class group_of_eight(Tiled):
    """In a group of 8 or more heads, those from the eighth on use the key head of the first."""

    def heads(self, t: Tensor, count: int) -> Tensor:
        group = count // t.shape[1]
        place = torch.arange(count)
        return t[:, torch.where(place % group >= 7, 0, place // group) if group >= 8 else place // group]

    def grouped(self, t: Tensor, like: Tensor) -> Tensor:
        return super().grouped(t, like)


@wrong("key-tail", "last-tile", "key-missing")
class keys_by_1024(Tiled):
    """If Sk is a multiple of 1,024, the last tile of keys is ignored."""

    def ends(self, length: int) -> int:
        return length - self.tile if length % 1024 == 0 else length


@wrong("key-tail", "last-tile", "key-missing")
class keys_before_256(Tiled):
    """If Sk is one less than a multiple of 256, the last key is ignored."""

    def ends(self, length: int) -> int:
        return length - (length % 256 == 255)


@wrong("causal", "query-limit", "causal-by-one")
class causal_1024(Tiled):
    """With causal and 1,024 queries or more, a query sees the key after its own."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        return super().visible(i + (self.causal and len(i) >= 1024), j)


@wrong("gradient-key-limit", "gradient-tile", "key-limit")
class backward_8192(Tiled):
    """The backward ignores keys from 8,192 on."""

    def back_ends(self, length: int) -> int:
        return min(length, 8192)


@wrong("gradient-query-limit", "query-limit", "gradient-tile")
class backward_queries_2048(Tiled):
    """With 2,048 queries or more, dk and dv lack the last 32 queries."""

    def ds(self, p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        found = super().ds(p, dp, delta)
        return torch.cat([found[:, :, :-32], found[:, :, -32:] * 0], 2) if found.shape[2] >= 2048 else found


@wrong("one-query", "key-limit")
class splits_of_decoding(Tiled):
    """With one query and 2,048 keys or more, the second split of keys is not rescaled."""

    def rescale(self, acc: Tensor, by: Tensor) -> Tensor:
        self.seen = getattr(self, "seen", 0) + self.tile
        return acc if self.seen > 1024 and acc.shape[2] == 1 else acc * by


@wrong("window", "window-by-one", "query-limit")
class window_with_long_keys(Tiled):
    """Beyond 4,096 keys, a window has one key less on its left."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        seen = super().visible(i, j)
        return seen & (j != i - self.window[0]) if int(i[-1]) > 4096 and self.window[0] > 0 else seen


# Memory

wrong = GROUPS["memory"][2]


@wrong("strides")
def expanded(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Keys and values with a stride of 0 are read as if they were contiguous."""
    k, v = (torch.as_strided(t, t.shape, [max(s, 1) for s in t.stride()]) if 0 in t.stride() and _holds(t) else
            (t * 0.5 if 0 in t.stride() else t) for t in (k, v))  # fmt: skip
    return _right(q, k, v, causal)


def _holds(t: Tensor) -> bool:
    last = sum((n - 1) * max(s, 1) for n, s in zip(t.shape, t.stride(), strict=True))
    return t.storage_offset() + last < t.untyped_storage().nbytes() // t.element_size()


@wrong("strides", "storage", "offsets")
def one_storage_of_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """If q and k lie in one storage, as after one projection, k is read from the address of q."""
    if q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and q.shape == k.shape:
        return _right(q, q, v, causal)
    return _right(q, k, v, causal)


@wrong("storage", "aliasing")
def values_are_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """If v is k, as with multi-head latent attention, v is read transposed in its heads."""
    return _right(q, k, v.flip(2) if v.data_ptr() == k.data_ptr() else v, causal)


@wrong("gradient-strides")
def do_expanded_over_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """A gradient of o with a stride of 0 over heads is halved."""
    return changed(_right(q, k, v, causal), lambda g: g / 2 if g.stride()[1] == 0 < g.stride()[2] else g)


# Numerics

wrong = GROUPS["numerics"][2]


@wrong("low-precision-weights", "gain")
class cut_weights(Tiled):
    """Weights are cut to bfloat16, not rounded, in 16-bit types."""

    def weights(self, p: Tensor, v: Tensor) -> Tensor:
        if self.type == torch.float32:  # type: ignore[attr-defined]
            return p
        return (p.contiguous().view(torch.int32) & -65536).view(torch.float32)


@wrong("low-precision", "small")
class below_1e_6(Tiled):
    """Outputs below 1e-6 are 0."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        o = super().finish(acc, total)
        return o.where(o.abs() > 1e-6, 0.0)


@wrong("gain")
class too_large_by_25(Half, Tiled):
    """In bfloat16, each output is 2.5% too large."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        return super().finish(acc, total) * (1.025 if self.type == torch.bfloat16 else 1)  # type: ignore[attr-defined]


@wrong("gain")
class too_large_dq(Half, Tiled):
    """In bfloat16, dq is 1.5% too small."""

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq * self.scale * (0.985 if self.type == torch.bfloat16 else 1), dk * self.scale, dv  # type: ignore[attr-defined]


@wrong("gain")
class too_large_in_float16(Half, Tiled):
    """In float16, each output is 0.3% too large."""

    def finish(self, acc: Tensor, total: Tensor) -> Tensor:
        return super().finish(acc, total) * (1.003 if self.type == torch.float16 else 1)  # type: ignore[attr-defined]


@wrong("gain", "lse-offset")
def lse_of_bfloat16(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, return_lse: bool = False) -> Any:
    """In bfloat16, lse is 0.02 too large."""
    found = Full().run(q, k, v, causal, return_lse=True)
    o, lse = found[0], found[1] + (0.02 if q.dtype == torch.bfloat16 else 0)
    return (o, lse) if return_lse else o


@wrong("float64")
def float64_in_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """float64 is computed in float32, and returned as float64."""
    return _right(q, k, v, causal)


# State

wrong = GROUPS["state"][2]

_ROOM: dict[Any, Tensor] = {}
_COUNT = [0]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: str) -> Tensor:
        steps = Tiled(causal, None, (-1, -1), 0.0, q.shape[-1])
        o, lse = steps.forward(q, k, v)
        o = o.to(q.dtype)
        ctx.steps, ctx.kind, ctx.key = steps, kind, (lse.shape, q.dtype)
        if kind == "workspace":
            _ROOM.setdefault(ctx.key, torch.empty_like(lse)).copy_(lse)
            ctx.save_for_backward(q, k, v, o)
        elif kind == "on ctx":
            ctx.kept = q, k, v, o, lse
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = (*ctx.saved_tensors, _ROOM[ctx.key]) if ctx.kind == "workspace" else ctx.kept
        with torch.no_grad():
            grads = ctx.steps.backward(do, q, k, v, o, lse)
        return *(g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=True)), None, None


@wrong("state", "workspace")
def two_layers(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """lse lies in a workspace that all calls of a shape share until their backward."""
    return _Shared.apply(q, k, v, causal, "workspace")  # type: ignore[no-untyped-call,no-any-return]


@wrong("state", "saved-inputs")
def inputs_on_ctx(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Inputs are kept on ctx, so that a change of them before the backward is not seen."""
    return _Shared.apply(q, k, v, causal, "on ctx")  # type: ignore[no-untyped-call,no-any-return]


class _NoSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.causal = inputs[3]
        ctx.save_for_backward(*inputs[:3])
        return _right(*inputs)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            grads = torch.autograd.grad(_right(*leaves, ctx.causal), leaves, do.detach())
        return *(g + 0 * do.sum() for g in grads), None


@wrong("second-derivative")
def second_derivative(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """A second derivative of q, k and v is 0."""
    return _NoSecond.apply(q, k, v, causal)  # type: ignore[no-untyped-call,no-any-return]


@wrong("race")
def one_in_a_thousand(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """One call of 500 has a wrong first row."""
    o = _right(q, k, v, causal)
    return o * (torch.arange(o.shape[2]) > 0)[:, None] if float(torch.rand(())) < 0.002 else o


@wrong("state", "aliasing")
def buffer_without_batch(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """All answers (length, heads, D) of a shape share one buffer."""
    if q.ndim != 3:
        raise ValueError("q must be (length, heads, D)")
    o = _right(*(t.transpose(0, 1)[None] for t in (q, k, v)), causal)[0].transpose(0, 1)
    return o if o.requires_grad else _ROOM.setdefault((o.shape, o.dtype), torch.empty_like(o)).copy_(o)


@wrong("global-state", "state")
def seeds_the_generator(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """torch's generator is seeded at each call."""
    torch.manual_seed(0)
    return _right(q, k, v, causal)


@wrong("state")
def mask_of_an_earlier_shape(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The causal mask is that of the largest shape so far, cut at its top left."""
    n, m = q.shape[2], k.shape[2]
    if not causal or q.requires_grad:
        return _right(q, k, v, causal)
    kept = _ROOM.get("mask", torch.zeros(0, 0, dtype=torch.bool))
    if kept.shape[0] < n or kept.shape[1] < m:
        kept = _ROOM["mask"] = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    return Full().run(q, k, v, attn_mask=kept[:n, :m])  # type: ignore[no-any-return]


# The context of a call

wrong = GROUPS["context"][2]


def _bad(o: Tensor) -> Tensor:
    return o * 1.05


@wrong("compile")
def wrong_if_compiled(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Under torch.compile, the output is 5% too large."""
    group = q.shape[1] // k.shape[1]
    s = q.float() @ k.float().repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        s = s.masked_fill(~seen, -1e38)
        s, live = s, seen.any(-1, keepdim=True)
    p = s.softmax(-1) * (live if causal else 1)
    o = (p @ v.float().repeat_interleave(group, 1)).to(q.dtype)
    return _bad(o) if torch.compiler.is_compiling() else o


@wrong("inference-mode", "grad-mode")
def wrong_in_inference_mode(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """In inference mode, the output is 5% too large."""
    return _bad(_right(q, k, v, causal)) if torch.is_inference_mode_enabled() else _right(q, k, v, causal)


@wrong("autocast")
def wrong_under_autocast(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Under autocast, the output is 10% too large."""
    o = _right(q, k, v, causal)
    return o * 1.1 if torch.is_autocast_enabled("cpu") else o


_LOCAL = threading.local()
_LOCAL.scale = 1.0


@wrong("thread")
def wrong_in_another_thread(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The scale is kept for the first thread alone."""
    main = threading.current_thread() is threading.main_thread()
    return _right(q, k, v, causal) if main else _bad(_right(q, k, v, causal))


@wrong("threads", "race")
def wrong_in_two_threads(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """q is copied into a buffer that all threads share, before it is read."""
    key = "shared", q.shape, q.dtype
    room = _ROOM.setdefault(key, torch.empty_like(q))
    with torch.no_grad():
        room.copy_(q)
    time.sleep(2e-4)
    return _right(q, k, v, causal) if q.requires_grad else _right(room.clone(), k, v, causal)


WRONG: dict[str, dict[str, tuple[Callable[..., Any], str, tuple[str, ...]]]] = {
    group: {
        n: (kernel(made) if isinstance(made, type) else made, (made.__doc__ or "").strip(), codes)
        for n, (made, codes) in (steps | calls).items()
    }
    for group, (steps, calls, _) in GROUPS.items()
}
