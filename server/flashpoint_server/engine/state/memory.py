"""Tensors in the memory that HTTP processes share with an engine."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_server.ipc.bodies import SLOT, PlacedTensor


class MappedMemory(NamedTuple):
    """The memory of a request: the mapped segments of its HTTP process by number, and the start of its slot."""

    segments: Mapping[int, mmap.mmap]
    segment: int
    start: int

    def find(self, t: PlacedTensor) -> tuple[mmap.mmap, int]:
        """Return the segment that contains a tensor, and the offset of the tensor in it."""
        if t.segment == SLOT:
            return self.segments[self.segment], self.start + t.offset
        return self.segments[t.segment], t.offset


def tensor_in(memory: MappedMemory, t: PlacedTensor) -> Tensor:
    """Return a tensor as a view of shared memory; a bool tensor is a copy."""
    view = bytes_in(memory, t)
    return view.ne(0) if t.dtype == "bool" else view


def bytes_in(memory: MappedMemory, t: PlacedTensor) -> Tensor:
    """Like `tensor_in`, but bool as uint8: a caller may send any byte, and only 0 and 1 are defined for bool."""
    dtype = torch.uint8 if t.dtype == "bool" else DTYPES[t.dtype]
    if not (count := math.prod(t.shape)):
        return torch.empty(t.shape, dtype=dtype, device="cpu")
    segment, offset = memory.find(t)
    return torch.frombuffer(segment, dtype=dtype, count=count, offset=offset).view(t.shape)
