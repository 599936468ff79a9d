"""Memory for an answer in the stride order of an input, so that what a model does next copies nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_like(t: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return dense memory on t's device, with the dimensions in the order of t's strides and the last one innermost.

    For q (B, H, S, D) that is a view of (B, S, H, D), o.transpose(1, 2) is contiguous. It is contiguous for an expanded
    t. `shape` has as many dimensions as t. Kernels write rows: `laid_like` is for a t whose columns are not innermost.
    """
    if t.is_contiguous():  # the usual case, in less time
        return torch.empty(shape, dtype=dtype or t.dtype, device=t.device)
    order = [dim for dim in _order(t) if dim != t.ndim - 1]
    return torch.empty_permuted(shape, (*order, t.ndim - 1), dtype=dtype or t.dtype, device=t.device)


def laid_like(answer: Tensor, t: Tensor) -> Tensor:
    """Return the answer in the order of t's strides: itself, or a copy where t's columns are not innermost."""
    if t.is_contiguous() or t.shape[-1] == 1 or (order := _order(t))[-1] == t.ndim - 1:
        return answer
    return torch.empty_permuted(answer.shape, order, dtype=answer.dtype, device=answer.device).copy_(answer)


def _order(t: Tensor) -> list[int]:
    """Return the dimensions from the largest stride to the smallest; as they are, if t is expanded."""
    strides, dims = t.stride(), list(range(t.ndim))
    if any(stride == 0 and size > 1 for stride, size in zip(strides, t.shape, strict=True)):
        return dims
    return sorted(dims, key=lambda dim: -strides[dim])
