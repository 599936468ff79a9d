"""Staging memory: shared between an HTTP process, which fills it from sockets, and the engines, which compute in it.

A pool of slots by size class over anonymous memory files (memfd), whose descriptors are passed to the engines. Nothing
has a name, so nothing can be left behind: a segment is gone when the last process that maps it is. A slot that is let
go is taken again before the pool grows; pages are touched when a segment is made, for fresh memory costs more than the
copy into it. A slot larger than the largest class gets a segment of its own, unmapped when it is released.

States of a slot: free (in its class's list) → held, by one or more → free.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count

from flashpoint_server.ipc.counts import Counts

ALIGNMENT = 64  # a cache line; the widest vector load of a CPU, and more than a GPU's copy engine asks
SMALLEST = 1 << 16
LARGEST = 1 << 28  # of the pooled classes; above it memory goes back when its request is done
WARM = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # bytes: 24 MiB in all
GROWTH = 1 << 22  # what the pool grows by at least, as several slots of a small class


class PoolFullError(Exception):
    """The pool is as large as it may be, or as the system lets it be, and too much of it is taken."""


class Segment:
    """One memory file, mapped here. `number` names it on the channel to the engines.

    `size` bytes of slots, and behind them, to the end of what is `mapped`, a page of marks: a byte a slot.
    """

    numbers = count()

    def __init__(self, size: int, *, touch: bool) -> None:
        self.number = next(self.numbers)
        self.size = size
        self.mapped = size + mmap.PAGESIZE
        self.fd = os.memfd_create("flashpoint-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.mapped)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if touch else 0)
            self._map = mmap.mmap(self.fd, self.mapped, flags=flags)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)

    def close(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # a view that is still held keeps the mapping until it is dropped
            self.view.release()
            self._map.close()


class Slot:
    """`size` bytes of a segment from `offset` on, held by a request's route and, while it is there, by its engine."""

    def __init__(self, pool: Pool, segment: Segment, offset: int, size: int) -> None:
        self._pool = pool
        self._holders = 0
        self.segment = segment
        self.offset = offset
        self.size = size
        self.mark_at = segment.size + offset // size  # where its mark is, in the segment

    @property
    def mark(self) -> bool:
        """A bit that the engine writes, too: see `Submit.mark`."""
        return bool(self.segment.view[self.mark_at])

    @mark.setter
    def mark(self, value: bool) -> None:
        self.segment.view[self.mark_at] = value

    def view(self, start: int, size: int) -> memoryview:
        """`size` bytes of the slot from `start` on."""
        return self.segment.view[self.offset + start : self.offset + start + size]

    def hold(self) -> Slot:
        """One more holder, which will call `release` once."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Let go. When the last holder does, another request may write here."""
        self._holders -= 1
        if not self._holders:
            self._pool.put_back(self)


class Pool:
    """Slots of `limit` bytes in all, together with the pools of the other HTTP processes.

    `dropped` is told the number of every segment that is given back. A pool that finds no room says so in
    `counts.wanted`, and the others give back what they do not use (`make_room`).
    """

    def __init__(
        self,
        limit: int,
        dropped: Callable[[int], None] = lambda number: None,
        counts: Counts | None = None,
    ) -> None:
        counts = counts or Counts()
        self.limit = limit
        self._dropped = dropped
        self.segments: dict[int, Segment] = {}
        self.taken = 0  # slots
        self._staged = counts.staged  # bytes
        self._wanted = counts.wanted  # when a pool last found no room, in `time.monotonic` seconds
        self._trimmed = 0.0  # and when this one last made room
        self._free: dict[int, list[Slot]] = defaultdict(list)

    def warm(self) -> None:
        """Make the first slots of common sizes before the first request needs them, as far as there is room."""
        slots = []
        with contextlib.suppress(PoolFullError):
            for size in WARM:
                slots.append(self.take(size))  # those before the failure are released, too
        for slot in slots:
            slot.release()

    def take(self, size: int) -> Slot:
        """A slot of at least `size` bytes, 64-byte aligned. Raises PoolFullError."""
        wanted = size_class(size)
        if wanted > LARGEST:
            slot = Slot(self, self._grow(wanted, touch=False), 0, wanted)
        else:
            if not self._free[wanted]:
                segment = self._grow(max(GROWTH // wanted, 1) * wanted, touch=True)
                self._free[wanted] = [Slot(self, segment, at, wanted) for at in range(0, segment.size, wanted)]
            slot = self._free[wanted].pop()  # the one let go last: its pages are the warmest
        self.taken += 1
        return slot.hold()

    def put_back(self, slot: Slot) -> None:
        self.taken -= 1
        if slot.size > LARGEST:
            self._drop(slot.segment)
        else:
            self._free[slot.size].append(slot)

    def close(self) -> None:
        for segment in list(self.segments.values()):
            self._drop(segment)

    def make_room(self) -> None:
        """Give back what is not used, where another process has found no room since this was last done."""
        if (wanted := self._wanted.largest) > self._trimmed:
            self._trimmed = wanted
            self._trim()

    def _grow(self, size: int, *, touch: bool) -> Segment:
        if not self._reserve(size):
            self._trim()
            if not self._reserve(size):
                self._trimmed = time.monotonic()
                self._wanted.set(self._trimmed)
                raise PoolFullError(f"{self._staged.total:.0f} of {self.limit} bytes of staging memory are in use")
        try:
            segment = Segment(size, touch=touch)
        except BaseException as error:
            self._staged.add(-size)
            if isinstance(error, OSError):  # no descriptor, no memory, or no address space
                message = f"the system has no {size} bytes of staging memory left: {error}"
                raise PoolFullError(message) from None
            raise
        self.segments[segment.number] = segment
        return segment

    def _reserve(self, size: int) -> bool:
        """Count `size` bytes more, where the limit allows them. Counted first: two processes never take the same."""
        self._staged.add(size)
        if self._staged.total <= self.limit:
            return True
        self._staged.add(-size)
        return False

    def _trim(self) -> None:
        """Give back segments of which every slot is free: room for another size class."""
        free: dict[int, int] = defaultdict(int)
        for slots in self._free.values():
            for slot in slots:
                free[slot.segment.number] += slot.size
        idle = {number for number, size in free.items() if size == self.segments[number].size}
        for wanted, slots in self._free.items():
            self._free[wanted] = [slot for slot in slots if slot.segment.number not in idle]
        for number in idle:
            self._drop(self.segments[number])

    def _drop(self, segment: Segment) -> None:
        del self.segments[segment.number]
        self._staged.add(-segment.size)
        segment.close()
        self._dropped(segment.number)


def size_class(size: int) -> int:
    """The pooled size that holds `size` bytes: a power of two or one and a half of one; pages for a giant."""
    if size > LARGEST:
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    power = max(SMALLEST, 1 << max(size - 1, 1).bit_length())
    return power * 3 // 4 if power > SMALLEST and size <= power * 3 // 4 else power


def aligned(n: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT
