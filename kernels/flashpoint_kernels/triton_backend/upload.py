"""The arrays that a launch reads, sent to its device in one copy from pinned memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: the alignment that kernels are compiled for


@dataclass(eq=False)
class Upload:
    """A set of arrays that are copied together when the first is requested; arrays that are added later are copied
    later.

    It keeps both copies. Kernels that run again read the same addresses and copy nothing, so a CUDA graph can capture a
    launch that has run once.
    """

    device: torch.device
    waiting: list[tuple[int, np.ndarray]] = field(default_factory=list)
    views: dict[int, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, array: np.ndarray) -> int:
        """Add an array, and return its number for `view`."""
        self.waiting.append((self.count, np.ascontiguousarray(array)))
        self.count += 1
        return self.count - 1

    def view(self, number: int) -> Tensor:
        """Return an array on the device."""
        if number not in self.views:
            self._copy()
        return self.views[number]

    def _copy(self) -> None:
        starts, size = [], 0
        for _, array in self.waiting:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for start, (_, array) in zip(starts, self.waiting, strict=True):
            host.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        there = host.to(self.device, non_blocking=True)
        for start, (number, array) in zip(starts, self.waiting, strict=True):
            dtype = torch.from_numpy(array[:0]).dtype
            self.views[number] = there[start : start + array.nbytes].view(dtype).view(array.shape)
        self.kept += [host, there]
        self.waiting.clear()
