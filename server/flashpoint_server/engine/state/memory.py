"""Tensors in the memory that HTTP processes share with an engine."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_server.ipc.bodies import PlacedTensor


def tensor_in(segments: Mapping[int, mmap.mmap], t: PlacedTensor) -> Tensor:
    """Return a tensor as a view of shared memory; a bool tensor is a copy."""
    view = bytes_in(segments, t)
    return view.ne(0) if t.dtype == "bool" else view


def bytes_in(segments: Mapping[int, mmap.mmap], t: PlacedTensor) -> Tensor:
    """Like `tensor_in`, but bool as uint8: a caller may send any byte, and only 0 and 1 are defined for bool."""
    dtype = torch.uint8 if t.dtype == "bool" else DTYPES[t.dtype]
    if not (count := math.prod(t.shape)):
        return torch.empty(t.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(segments[t.segment], dtype=dtype, count=count, offset=t.offset).view(t.shape)
