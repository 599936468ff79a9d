"""Masks as numbers to add to scores: −∞ where a key is not seen, else 0 or the float mask's own.

Masks are made with bits and integers, whose operations are vectorised. `masked_fill` and `where` are not: on the CPU
they take 2.5 ns an element, and an addition 0.15 (torch 2.13, an Intel Xeon).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashpoint_kernels.problem import narrowed

_MINUS_INFINITY = -0x800000  # its bits in float32


def added(mask: Tensor) -> Tensor:
    """Return a mask of booleans or numbers as float32."""
    if mask.dtype == torch.bool:
        return mask.to(torch.int32).sub_(1).bitwise_and_(_MINUS_INFINITY).view(torch.float32)
    return narrowed(mask) if mask.dtype == torch.float64 else mask.float()


def outside(ahead: Tensor, left: int, right: int) -> Tensor:
    """Return the mask of a window where `ahead`, int32, says how far each key is ahead of its query."""
    hidden = ahead.clone().gt_(right).add_(ahead.clone().lt_(-left))
    return hidden.neg_().bitwise_and_(_MINUS_INFINITY).view(torch.float32)
