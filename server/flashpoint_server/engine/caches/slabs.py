"""Memory of whole chunks: slabs of address space, in which those of one layer lie one behind the other.

Attention reads chunks at equal distances as one tensor (flashpoint_kernels.chunked). A slab is address space alone: a
chunk has memory from when it is written until it is given back, whatever the others of its slab do.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 1 << 21  # bytes of a huge page
LEAST_BYTES = 1 << 18  # of a chunk in a slab: the system maps 65,530 pieces of memory at most
MOST_CHUNKS = 64  # that a slab has room for beyond those that are asked for


class Slab:
    """Address space for `room` chunks of `nbytes` each. `whole` is all of it, in `dtype`. Raises MemoryError.

    Chunks as large as a huge page begin on one: to attend to 4,096 keys of 8 heads, D 64, float32, takes two thirds of
    the time that it takes with pages of 4 KiB.
    """

    __slots__ = ("_free", "_huge", "_memory", "_start", "distance", "whole")

    def __init__(self, nbytes: int, dtype: torch.dtype, room: int) -> None:
        page = HUGE if nbytes >= HUGE else mmap.PAGESIZE
        self._huge = nbytes // HUGE * HUGE  # no page beyond what is counted
        distance = -(-nbytes // page) * page
        try:
            self._memory = mmap.mmap(-1, distance * room + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError from error
        around = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._start = -around.data_ptr() % page
        self.whole: Tensor = around[self._start : self._start + distance * room].view(dtype)
        self.distance = distance // dtype.itemsize  # in numbers
        self._free = set(range(room))

    def take(self, place: int) -> bool:
        """Take a place for a chunk; False where there is none, or it is taken."""
        if place not in self._free:
            return False
        self._free.remove(place)
        if self._huge:
            with suppress(OSError):  # a kernel that has none
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._offset(place), self._huge)
        return True

    def give_back(self, place: int) -> None:
        """Give a chunk's memory back to the system. Nobody reads it any more."""
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_DONTNEED, self._offset(place), self.distance * self.whole.itemsize)
        self._free.add(place)

    def _offset(self, place: int) -> int:
        return self._start + place * self.distance * self.whole.itemsize
