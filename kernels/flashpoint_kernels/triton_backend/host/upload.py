"""The arrays that a launch reads, sent to its device in one copy from pinned memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: the alignment that kernels are compiled for


class Upload:
    """A set of arrays that are copied together when the first is requested; arrays that are added later are copied
    later.

    It keeps both copies. Kernels that run again read the same addresses and copy nothing, so a CUDA graph can capture a
    launch that has run once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[np.ndarray] = []
        self._views: list[Tensor] = []
        self._kept: list[Tensor] = []

    def add(self, array: np.ndarray) -> int:
        """Add a contiguous array, and return its number for `view`."""
        self._waiting.append(array)
        return len(self._views) + len(self._waiting) - 1

    def view(self, number: int) -> Tensor:
        """Return an array on the device, in one dimension."""
        if number >= len(self._views):
            self._copy()
        return self._views[number]

    def _copy(self) -> None:
        words = [-(-array.nbytes // _ALIGNMENT) * (_ALIGNMENT // 4) for array in self._waiting]
        host = torch.empty(sum(words), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        there = host if self._device.type == "cpu" else torch.empty_like(host, device=self._device)
        numbers, start, of_dtype = host.numpy(), 0, {np.dtype(np.int32): there}
        for array, count in zip(self._waiting, words, strict=True):
            numbers[start : start + array.nbytes // 4] = array.reshape(-1).view(np.int32)
            view = of_dtype.get(array.dtype)
            if view is None:
                view = of_dtype.setdefault(array.dtype, there.view(_DTYPES[array.dtype]))
            first = start * 4 // array.itemsize
            self._views.append(view[first : first + array.size])
            start += count
        if there is not host:
            there.copy_(host, non_blocking=True)
        self._kept += [host, there]
        self._waiting.clear()


_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}
