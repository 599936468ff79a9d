"""Tensors in the memory that HTTP processes share with an engine."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from flashpoint_kernels.problem import DTYPES
from flashpoint_server.ipc.messages import PlacedTensor


def tensor_in(segments: Mapping[int, mmap.mmap], t: PlacedTensor) -> Tensor:
    """Return the tensor, in shared memory."""
    found = bytes_in(segments, t)
    return found.ne(0) if t.dtype == "bool" else found


def bytes_in(segments: Mapping[int, mmap.mmap], t: PlacedTensor) -> Tensor:
    """As `tensor_in`, but a bool as uint8: any byte is sent for one, and one that is neither 0 nor 1 is undefined."""
    dtype = torch.uint8 if t.dtype == "bool" else DTYPES[t.dtype]
    if not (count := math.prod(t.shape)):
        return torch.empty(t.shape, dtype=dtype)
    return torch.frombuffer(segments[t.segment], dtype=dtype, count=count, offset=t.offset).view(t.shape)
