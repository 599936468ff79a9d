"""The rotary embedding by its definition, and for each dtype the allowed error of flash-attn's functions."""

from __future__ import annotations

import torch
from torch import Tensor

BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=BOUND[dtype], rtol=BOUND[dtype])


def rotated(x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool, step: int = 1) -> Tensor:
    """Return x (S, H, D) rotated by RoFormer's equation 34, as a product of complex numbers in float64.

    Row n of x is at position `first` + n · `step`.
    """
    half = cos.shape[1]
    rotary = x[..., : 2 * half].double()
    pairs = rotary.unflatten(-1, (half, 2)) if interleaved else rotary.unflatten(-1, (2, half)).transpose(-1, -2)
    places = first + step * torch.arange(len(x), device=x.device)
    factor = torch.complex(cos[places].double(), sin[places].double())[:, None]
    actual = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    actual = actual.flatten(-2) if interleaved else actual.transpose(-1, -2).flatten(-2)
    return torch.cat([actual, x[..., 2 * half :].double()], -1)
