"""The layout of one request's tensors in its slot: inputs, then outputs, each aligned to 64 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flashpoint_contract.tensors import INDEX_TENSORS, ITEMSIZE, TensorInfo
from flashpoint_server.ipc.bodies import PlacedTensor
from flashpoint_server.ipc.memory import Pool, PoolFullError, Segment, Slot, aligned, size_class
from flashpoint_server.ipc.regions import Region
from flashpoint_server.refusal import Refusal

NOWHERE: Mapping[str, tuple[Region, int]] = {}


class Place(NamedTuple):
    """The place of a tensor: `size` bytes from `start` in the slot, or in the caller's `region`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    region: Region | None = None


class Layout(NamedTuple):
    """The places of a request's tensors: inputs in the order of their bytes, then outputs.

    They end at `end` of a slot with `size` bytes. `nbytes` are the bytes of all tensors, and `shapes` those of the
    inputs as lists, for the log. `regions` are shared memory of callers that contains some of the tensors. Requests
    may share a layout, so nobody may change it.
    """

    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    end: int
    size: int
    nbytes: int
    shapes: Mapping[str, list[int]]
    regions: tuple[Region, ...] = ()

    @classmethod
    def of(
        cls,
        inputs: Iterable[tuple[str, TensorInfo]],
        outputs: Mapping[str, TensorInfo],
        elsewhere: Mapping[str, tuple[Region, int]] = NOWHERE,
    ) -> Layout:
        """Lay out the inputs, in this order, and the outputs. Tensors in `elsewhere` need no place in the slot."""
        end = nbytes = 0

        def place(name: str, info: TensorInfo) -> Place:
            nonlocal end, nbytes
            size = math.prod(info.shape) * ITEMSIZE[info.dtype]
            nbytes += size
            if name in elsewhere:
                region, start = elsewhere[name]
                return Place(info.dtype, info.shape, start, size, region)
            start, end = end, aligned(end + size)
            return Place(info.dtype, info.shape, start, size)

        placed = {name: place(name, info) for name, info in inputs}
        answers = {name: place(name, info) for name, info in outputs.items()}
        shapes = {name: list(one.shape) for name, one in placed.items()}
        regions = tuple({region for region, _ in elsewhere.values()})
        return cls(placed, answers, end, size_class(end), nbytes, shapes, regions)


@dataclass(eq=False)
class Staging:
    """A request's memory, from the first byte of its tensors to the last byte of its answer.

    `regions` are shared memory of callers that contains some of the tensors. Each holder calls `release` once.
    """

    slot: Slot
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    regions: tuple[Region, ...]

    @classmethod
    def take(cls, pool: Pool, layout: Layout) -> Staging:
        """Allocate memory for a layout. Raises Refusal 429 if there is no room now, and 413 if there never will be."""
        if layout.size > pool.limit:
            raise Refusal(
                "work_too_large",
                f"the request needs {layout.end} bytes of staging memory, over the limit of {pool.limit}",
            )
        try:
            slot = pool.take(layout.size)
        except PoolFullError as error:
            raise Refusal("queue_full", str(error)) from None
        for region in layout.regions:
            region.hold()
        return cls(slot, layout.inputs, layout.outputs, layout.regions)

    @property
    def segments(self) -> tuple[Segment | Region, ...]:
        """The segments that the engine must map."""
        return (self.slot.segment, *self.regions)

    def views(self, places: Mapping[str, Place]) -> dict[str, memoryview]:
        """Return the bytes of each tensor in the slot."""
        return {name: self.slot.view(p.start, p.size) for name, p in places.items() if p.region is None}

    def index(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the values of the index tensors, which are always in the slot; empty if there are none."""
        return {
            name: np.frombuffer(self.slot.view(p.start, p.size), p.dtype)
            for name, p in self.inputs.items()
            if name in INDEX_TENSORS
        }

    def described(self, places: Mapping[str, Place]) -> list[PlacedTensor]:
        """Return the tensors as messages to the engine describe them; offsets are within the segment."""
        ours, offset = self.slot.segment.number, self.slot.offset
        return [
            PlacedTensor(name, p.dtype, p.shape, ours, offset + p.start)
            if p.region is None
            else PlacedTensor(name, p.dtype, p.shape, p.region.number, p.start)
            for name, p in places.items()
        ]

    def hold(self) -> None:
        """Add a holder: the engine, as long as it may write there."""
        self.slot.hold()
        for region in self.regions:
            region.hold()

    def release(self) -> None:
        self.slot.release()
        for region in self.regions:
            region.release()
