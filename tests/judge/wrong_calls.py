"""Wrong functions whose mistake is not a step of `Tiled`: they keep state, misuse memory, race or crash."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.judge.tiled import Tiled, collected, kernel

_, CALLS, called = collected()


def _right(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return kernel(Tiled)(q, k, v, causal)


_KEPT: dict[Any, Tensor] = {}
_COUNT = [0]


@called("replay", "aliasing")
def replay(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The first answer for a shape is returned for all later inputs of this shape."""
    key = "replay", q.shape, k.shape, q.dtype, causal, q.requires_grad
    if key not in _KEPT:
        _KEPT[key] = _right(q, k, v, causal)
    return _KEPT[key]


@called("replay")
def replay_by_address(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The first answer for inputs at an address is returned for later ones there, as with a captured CUDA graph."""
    if q.requires_grad:
        return _right(q, k, v, causal)
    key = "address", q.data_ptr(), k.data_ptr(), q.shape, k.shape, q.dtype, causal
    if key not in _KEPT:
        _KEPT[key] = _right(q, k, v, causal)
    return _KEPT[key].clone()


@called("aliasing")
def same_buffer(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """All answers of a shape share one buffer."""
    o = _right(q, k, v, causal)
    if q.requires_grad:
        return o
    return _KEPT.setdefault(("buffer", o.shape, o.dtype), torch.empty_like(o)).copy_(o)


@called("mutation")
def scales_q(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """q is scaled in place, and not restored exactly."""
    o = _right(q, k, v, causal)
    with torch.no_grad():
        q.mul_(0.3).div_(0.3).add_(1e-3)
    return o


@called("first-call")
def cold(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The first answer of the process is wrong, as if autotuning had left the output of a trial."""
    _COUNT[0] += 1
    return _right(q, k, v, causal) * (0.5 if _COUNT[0] == 1 else 1)


@called("race")
def race(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The first 8 rows are 0 in one call of 20, as if a race had lost a tile."""
    o = _right(q, k, v, causal)
    return o * (torch.arange(o.shape[2]) > 7)[:, None] if float(torch.rand(())) < 0.05 else o


@called("strides")
def contiguous_alone(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Strides are ignored: memory is read as if it were contiguous."""
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return _right(q, k, v, causal)
    flat = [torch.as_strided(t, t.shape, torch.empty(t.shape).stride(), t.storage_offset())
            if _spans(t) >= t.numel() else t for t in (q, k, v)]  # fmt: skip
    return _right(*flat, causal)  # type: ignore[misc]


def _spans(t: Tensor) -> int:
    return t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()


@called("offsets")
def no_offset(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The offset of the inputs in their storage is ignored."""
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return _right(q, k, v, causal)
    return _right(*(torch.as_strided(t, t.shape, t.stride(), 0) for t in (q, k, v)), causal)


@called("strides", "strides-last")
def no_last_stride(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The stride of the last dimension is taken for 1."""
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return _right(q, k, v, causal)
    return _right(*(torch.as_strided(t, t.shape, (*t.stride()[:-1], 1)) for t in (q, k, v)), causal)


class _Do(torch.autograd.Function):
    """A copy of o whose backward ignores the strides of do, or changes do in place."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return o.clone()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.kind == "mutated":
            kept = do.clone()
            do.mul_(0.5)
            return kept, None
        if _spans(do) < do.numel():
            return do, None
        return torch.as_strided(do, do.shape, torch.empty(do.shape).stride(), do.storage_offset()), None


@called("gradient-strides")
def do_strides(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The strides of do are ignored."""
    return _Do.apply(_right(q, k, v, causal), "strides")  # type: ignore[no-untyped-call,no-any-return]


@called("mutation")
def do_mutated(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """do is scaled in place."""
    return _Do.apply(_right(q, k, v, causal), "mutated")  # type: ignore[no-untyped-call,no-any-return]


@called("crash")
def crash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The process crashes if there are more than 1,000 queries."""
    if q.shape[2] > 1000:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGSEGV)
    return _right(q, k, v, causal)


@called("lse-gradient", "base-2", "base-2-lse")
def lse_in_base_two(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """lse is in base 2."""
    o = _right(q, k, v, causal)
    with torch.no_grad():
        lse = Tiled(causal, None, (-1, -1), 0.0, q.shape[-1]).forward(q, k, v)[1][..., 0] / math.log(2)
    return (o, lse) if return_lse else o
