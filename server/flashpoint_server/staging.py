"""Where the tensors of one request lie in its slot: inputs, then outputs, each at a 64-byte aligned place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flashpoint_kernels.spec import ITEMSIZE, TensorInfo
from flashpoint_server.memory import Pool, PoolFullError, Slot, aligned, size_class
from flashpoint_server.messages import Tensor
from flashpoint_server.refusal import Refusal


class Place(NamedTuple):
    """A tensor's place: `size` bytes from `start` on, within the slot."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(eq=False)
class Staging:
    """A request's memory, from the first byte of its tensors to the last of its answer. Released once."""

    slot: Slot
    inputs: dict[str, Place]
    outputs: dict[str, Place]

    @classmethod
    def take(cls, pool: Pool, inputs: Iterable[tuple[str, TensorInfo]], outputs: Mapping[str, TensorInfo]) -> Staging:
        """Room for the inputs, in this order, and the outputs. Raises Refusal 429 where there is none, 413 if never."""
        end = 0

        def place(info: TensorInfo) -> Place:
            nonlocal end
            size = math.prod(info.shape) * ITEMSIZE[info.dtype]
            start, end = end, aligned(end + size)
            return Place(info.dtype, info.shape, start, size)

        placed = {name: place(info) for name, info in inputs}
        answers = {name: place(info) for name, info in outputs.items()}
        if size_class(end) > pool.limit:
            raise Refusal("work_too_large", f"this needs {end} bytes of staging memory where there are {pool.limit}")
        try:
            slot = pool.take(end)
        except PoolFullError as error:
            raise Refusal("queue_full", str(error)) from None
        return cls(slot, placed, answers)

    def views(self, places: Mapping[str, Place]) -> dict[str, memoryview]:
        """Each tensor's bytes."""
        return {name: self.slot.view(place.start, place.size) for name, place in places.items()}

    def described(self, places: Mapping[str, Place]) -> list[Tensor]:
        """The tensors as the engine is told of them: offsets are within the segment."""
        return [Tensor(name, p.dtype, p.shape, self.slot.offset + p.start) for name, p in places.items()]

    def release(self) -> None:
        self.slot.release()
