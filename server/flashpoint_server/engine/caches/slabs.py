"""Allocate whole chunks in slabs of address space, so that the chunks of one layer are adjacent.

A slab is only address space: a chunk has memory from its first write until it is returned, independent of other chunks
in the slab. A chunk that is at least as large as a huge page begins at one.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 1 << 21  # bytes of a huge page
LEAST_BYTES = 1 << 18  # minimum bytes of a chunk in a slab, because Linux allows a process at most 65,530 mappings
MOST_CHUNKS = 64  # maximum number of chunks in a slab, unless one call needs more at once


class Slab:
    """Address space for `room` chunks of `nbytes` each. `whole` is this memory as a tensor. Raises MemoryError.

    Chunks of at least a huge page begin on one: attention to 4,096 keys of 8 heads, D 64, float32, then takes two
    thirds of the time that it takes with pages of 4 KiB.
    """

    __slots__ = ("_free", "_huge", "_memory", "_start", "distance", "whole")

    def __init__(self, nbytes: int, dtype: torch.dtype, room: int) -> None:
        page = HUGE if nbytes >= HUGE else mmap.PAGESIZE
        self._huge = nbytes // HUGE * HUGE  # in bytes; only whole huge pages: the ledger counts `nbytes` for a chunk
        distance = -(-nbytes // page) * page
        try:
            self._memory = mmap.mmap(-1, distance * room + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError from error
        around = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._start = -around.data_ptr() % page
        self.whole: Tensor = around[self._start : self._start + distance * room].view(dtype)
        self.distance = distance // dtype.itemsize  # distance between chunks in elements
        self._free = set(range(room))

    def take(self, place: int) -> bool:
        """Reserve the memory of chunk number `place`. Return False if it is in use or does not exist."""
        if place not in self._free:
            return False
        self._free.remove(place)
        if self._huge:
            with suppress(OSError):  # the system's kernel may not support huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._offset(place), self._huge)
        return True

    def give_back(self, place: int) -> None:
        """Return a chunk's memory to the system. The memory must not be in use."""
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_DONTNEED, self._offset(place), self.distance * self.whole.itemsize)
        self._free.add(place)

    def _offset(self, place: int) -> int:
        return self._start + place * self.distance * self.whole.itemsize
