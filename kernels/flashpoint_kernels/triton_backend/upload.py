"""The arrays that a launch reads, brought to its device in one copy from pinned memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: what kernels are compiled for


@dataclass(eq=False)
class Upload:
    """Arrays are added, and are all copied when the first of them is asked for; what is added later is copied then.

    It keeps both copies. Kernels that run again read the same addresses and copy nothing, so a launch that has run once
    can be captured in a CUDA graph.
    """

    device: torch.device
    waiting: list[tuple[int, np.ndarray]] = field(default_factory=list)
    views: dict[int, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, array: np.ndarray) -> int:
        """Return the number by which `view` has the array."""
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
