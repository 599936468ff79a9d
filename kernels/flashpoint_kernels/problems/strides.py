"""Allocate an answer with the stride order of an input, so that a model's next operation copies nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_like(t: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return dense memory on t's device, with the dimensions in the order of t's strides and the last one innermost.

    For q (B, H, S, D) that is a view of (B, S, H, D), o.transpose(1, 2) is contiguous. If t is expanded, the memory is
    contiguous. `shape` has as many dimensions as t. Kernels write rows with adjacent columns; see `laid_like` for a t
    with another order.
    """
    if t.is_contiguous():  # a faster path for the usual case
        return torch.empty(shape, dtype=dtype or t.dtype, device=t.device)
    order = [dim for dim in _order(t) if dim != t.ndim - 1]
    return torch.empty_permuted(shape, (*order, t.ndim - 1), dtype=dtype or t.dtype, device=t.device)


def laid_like(answer: Tensor, t: Tensor) -> Tensor:
    """Return the answer with t's order of strides: unchanged, or a copy if t's last dimension is not innermost."""
    if t.is_contiguous() or t.shape[-1] == 1 or (order := _order(t))[-1] == t.ndim - 1:
        return answer
    return torch.empty_permuted(answer.shape, order, dtype=answer.dtype, device=answer.device).copy_(answer)


def _order(t: Tensor) -> list[int]:
    """Return the dimensions in the order of falling strides; unchanged if t is expanded."""
    strides, dims = t.stride(), list(range(t.ndim))
    if any(stride == 0 and size > 1 for stride, size in zip(strides, t.shape, strict=True)):
        return dims
    return sorted(dims, key=lambda dim: -strides[dim])
