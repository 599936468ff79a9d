"""Masks as numbers that are added to scores: −∞ for hidden keys, else 0 or the float mask's value.

Masks are computed with bit and integer operations, which are vectorised. `masked_fill` and `where` are not: on the CPU
they take 2.5 ns an element, but an addition takes 0.15 ns (torch 2.13, an Intel Xeon).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import narrowed

_MINUS_INFINITY = -0x800000  # bits of −∞ in float32


def added(mask: Tensor) -> Tensor:
    """Return a mask of booleans or floats as float32 summands of scores."""
    if mask.dtype == torch.bool:
        return mask.to(torch.int32).sub_(1).bitwise_and_(_MINUS_INFINITY).view(torch.float32)
    return narrowed(mask) if mask.dtype == torch.float64 else mask.float()


def outside(ahead: Tensor, left: int, right: int) -> Tensor:
    """Return a window's mask as summands. `ahead`, int32, is the position of each key minus that of its query."""
    hidden = ahead.clone().gt_(right).add_(ahead.clone().lt_(-left))
    return hidden.neg_().bitwise_and_(_MINUS_INFINITY).view(torch.float32)
