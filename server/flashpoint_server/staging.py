"""Memory that a body streams into: one copy from the socket's chunk, each tensor at a 64-byte aligned place."""

from __future__ import annotations

import numpy as np

from flashpoint.wire import Head
from flashpoint_server.job import RawTensor

ALIGNMENT = 64  # a cache line; the widest vector load of a CPU, and more than a GPU's copy engine asks


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


class Staging:
    """One request's tensors, being filled from the data section that follows `head`."""

    def __init__(self, head: Head) -> None:
        sizes = [t.stop - t.start for t in head.tensors]
        memory = np.empty(sum(map(_aligned, sizes)) + ALIGNMENT, np.uint8)  # not zeroed: every byte is written
        place = -memory.ctypes.data % ALIGNMENT
        self.tensors: dict[str, RawTensor] = {}
        for t, size in zip(head.tensors, sizes, strict=True):
            self.tensors[t.name] = RawTensor(t.dtype, t.shape, memory[place : place + size])
            place += _aligned(size)
        self._places = [t.data.data for t in self.tensors.values() if t.data.size]
        self._next = 0  # the place being filled,
        self._filled = 0  # and how much of it is

    @property
    def full(self) -> bool:
        return self._next == len(self._places)

    def write(self, chunk: memoryview) -> int:
        """Copy as much of `chunk` as there is room for; the number of bytes that were taken."""
        taken = 0
        while taken < len(chunk) and not self.full:
            place = self._places[self._next]
            size = min(len(place) - self._filled, len(chunk) - taken)
            place[self._filled : self._filled + size] = chunk[taken : taken + size]
            taken += size
            self._filled += size
            if self._filled == len(place):
                self._next, self._filled = self._next + 1, 0
        return taken
