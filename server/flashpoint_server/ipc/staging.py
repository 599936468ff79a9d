"""Staging memory: an HTTP process fills it from sockets, and the engines compute in it.

A pool manages slots by size class in anonymous memory files (memfd); their descriptors are sent to the engines. The
files have no name, so none can be left behind: a segment is freed when the last process unmaps it. The pool reuses
released slots before it grows. The memory pages of its segments are touched when they are made, because the page
faults of fresh memory cost more than the copy into it. A slot above the largest class gets its own segment, which is
not touched, and is unmapped at its release.

States of a slot: free (in the list of its class) → used by one or more holders → free. The slot of a request contains
its tensors: inputs, then outputs, each aligned to 64 bytes.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flashpoint_contract.tensors import INDEX_TENSORS, ITEMSIZE, TensorInfo
from flashpoint_server.ipc.bodies import SLOT, PlacedTensor
from flashpoint_server.ipc.counts import Counts
from flashpoint_server.ipc.regions import SEGMENT_NUMBERS, Region

ALIGNMENT = 64  # bytes of a cache line: enough for the widest vector load of a CPU and for a GPU's copy engine
SMALLEST = 1 << 16
LARGEST = 1 << 28  # largest pooled class; larger slots are freed after their request
WARM = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # sizes of the first slots in bytes; their segments have 28 MiB in all
# Largest segment that the event loop maps or frees in one step: the system takes 0.6 ms for the pages of a MiB. Larger
# ones get their pages while the body arrives, and a thread frees them.
AT_ONCE = 1 << 24
GROWTH = 1 << 22  # minimum bytes by which the pool grows: a segment of a small class has several slots

NOWHERE: Mapping[str, tuple[Region, int]] = {}


class PoolFullError(Exception):
    """The pool has no free slot, and cannot grow: it has reached its limit, or a limit of the system."""


class Segment:
    """One memory file, mapped in this process. `number` is its id on the channel to the engines.

    It has `size` bytes of slots, then a page with a byte for each slot, its mark (see `Submit`): `mapped` bytes in all.
    """

    def __init__(self, size: int, *, touch: bool) -> None:
        self.number = next(SEGMENT_NUMBERS)
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
        with contextlib.suppress(BufferError):  # a view that is still in use keeps the mapping alive
            self.view.release()
            self._map.close()


class Slot:
    """`size` bytes of a segment at `offset`. Its holders are the request's route and, during the job, the engine."""

    def __init__(self, pool: Pool, segment: Segment, offset: int, size: int) -> None:
        self._pool = pool
        self._holders = 0
        self.segment = segment
        self.offset = offset
        self.size = size
        self.mark_at = segment.size + offset // size  # position of the slot's mark in the segment

    @property
    def mark(self) -> bool:
        """Whether the engine has started the job: the engine sets this flag (see `Submit.mark`)."""
        return bool(self.segment.view[self.mark_at])

    @mark.setter
    def mark(self, value: bool) -> None:
        self.segment.view[self.mark_at] = value

    def hold(self) -> Slot:
        """Add a holder, which must call `release` once."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder. After the last one, another request may use the slot."""
        self._holders -= 1
        if not self._holders:
            self._pool.put_back(self)


class Pool:
    """Slots of at most `limit` bytes in total, counted together with the pools of the other HTTP processes.

    `dropped` is called with the number of each freed segment. A pool that cannot grow writes the time into
    `counts.wanted`; the pools of the other processes then free their unused segments (`make_room`).
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
        self.taken = 0  # number of slots in use
        self._column = counts.column
        self._staged = counts.staged  # bytes of each process's segments
        self._wanted = counts.wanted  # when each process's pool last could not grow, in `time.monotonic` seconds
        self._trimmed = 0.0  # the latest time in `_wanted` after which this pool has freed its unused segments
        self._free: dict[int, list[Slot]] = defaultdict(list)

    def warm(self) -> None:
        """Allocate the first slots of common sizes before the first request needs them, as far as the limit allows."""
        slots = []
        with contextlib.suppress(PoolFullError):
            for size in WARM:
                slots.append(self.take(size))  # if this fails, the loop below releases the earlier slots
        for slot in slots:
            slot.release()

    def take(self, size: int) -> Slot:
        """Return a slot of at least `size` bytes, aligned to 64 bytes. Raises PoolFullError."""
        wanted = size if size in self._free else size_class(size)
        if wanted > LARGEST:
            slot = Slot(self, self._grow(wanted), 0, wanted)
        else:
            if not self._free[wanted]:
                segment = self._grow(max(GROWTH // wanted, 1) * wanted)
                self._free[wanted] = [Slot(self, segment, at, wanted) for at in range(0, segment.size, wanted)]
            slot = self._free[wanted].pop()  # the slot released last: its pages are probably still in the CPU's cache
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
        """Free unused segments if the pool of another process could not grow since the last call."""
        if (wanted := max(self._wanted)) > self._trimmed:
            self._trimmed = wanted
            self._trim()

    def _grow(self, size: int) -> Segment:
        if not self._reserve(size):
            self._trim()
            if not self._reserve(size):
                self._trimmed = time.monotonic()
                self._wanted[self._column] = self._trimmed
                raise PoolFullError(f"{sum(self._staged):.0f} of {self.limit} bytes of staging memory are in use")
        try:
            segment = Segment(size, touch=size <= AT_ONCE)
        except BaseException as error:
            self._staged[self._column] -= size
            if isinstance(error, OSError):  # no descriptor, memory or address space is left
                message = f"the system cannot provide {size} bytes of staging memory: {error}"
                raise PoolFullError(message) from None
            raise
        self.segments[segment.number] = segment
        return segment

    def _reserve(self, size: int) -> bool:
        """Count `size` more bytes, and return True if the limit allows them.

        The bytes are counted before the check, so that two processes cannot both get the last free bytes.
        """
        self._staged[self._column] += size
        if sum(self._staged) <= self.limit:
            return True
        self._staged[self._column] -= size
        return False

    def _trim(self) -> None:
        """Free the segments whose slots are all free, so that other size classes can grow."""
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
        self._staged[self._column] -= segment.size
        if segment.size > AT_ONCE:
            threading.Thread(target=segment.close, name="free staging memory").start()
        else:
            segment.close()
        self._dropped(segment.number)


def size_class(size: int) -> int:
    """Return the size class for `size` bytes: a power of two, or 1.5 times one; above LARGEST, whole pages."""
    if size > LARGEST:
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    power = max(SMALLEST, 1 << max(size - 1, 1).bit_length())
    return power * 3 // 4 if power > SMALLEST and size <= power * 3 // 4 else power


def aligned(n: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Layout:
    """The locations of a request's tensors: inputs in the order of their bytes, then outputs.

    They end at `end` of a slot with `size` bytes. `nbytes` is the size of all tensors. `shapes` has the shapes of the
    inputs as lists, for the log. `indexed`: some inputs are index tensors. `regions` are shared memory of callers that
    contains some of the tensors.
    """

    inputs: tuple[PlacedTensor, ...]
    outputs: tuple[PlacedTensor, ...]
    end: int
    size: int
    nbytes: int
    shapes: Mapping[str, list[int]]
    indexed: bool
    regions: tuple[Region, ...]

    @classmethod
    def of(
        cls,
        inputs: Iterable[tuple[str, TensorInfo]],
        outputs: Mapping[str, TensorInfo],
        elsewhere: Mapping[str, tuple[Region, int]] = NOWHERE,
    ) -> Layout:
        """Lay out the inputs, in this order, and the outputs. Tensors in `elsewhere` need no memory in the slot."""
        end = nbytes = 0

        def place(name: str, info: TensorInfo) -> PlacedTensor:
            nonlocal end, nbytes
            size = math.prod(info.shape) * ITEMSIZE[info.dtype]
            nbytes += size
            if name in elsewhere:
                region, start = elsewhere[name]
                return PlacedTensor(name, info.dtype, info.shape, region.number, start)
            start, end = end, aligned(end + size)
            return PlacedTensor(name, info.dtype, info.shape, SLOT, start)

        placed = tuple([place(name, info) for name, info in inputs])
        answers = tuple([place(name, info) for name, info in outputs.items()])
        shapes = {t.name: list(t.shape) for t in placed}
        regions = tuple({region for region, _ in elsewhere.values()})
        indexed = any(name in shapes for name in INDEX_TENSORS)
        return cls(placed, answers, end, size_class(end), nbytes, shapes, indexed, regions)
