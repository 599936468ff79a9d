"""The one object that travels with a request from its head to its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashpoint_kernels.spec import Spec

Bytes = NDArray[np.uint8]


class RawTensor(NamedTuple):
    """A tensor as its bytes: `data` is (nbytes,) uint8, row-major, starting at an aligned place."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(eq=False)
class Timings:
    """When each part of the way began, in `time.perf_counter` seconds; `decode` includes the body's arrival."""

    decode: float
    queue: float = 0.0
    compute: float = 0.0
    encode: float = 0.0
    done: float = 0.0

    def durations(self) -> dict[str, float]:
        """Milliseconds of each part."""
        marks = (self.decode, self.queue, self.compute, self.encode, self.done)
        return {
            name: round((marks[i + 1] - marks[i]) * 1000, 3)
            for i, name in enumerate(("decode", "queue", "compute", "encode"))
        }


@dataclass(eq=False)
class Job:
    """What one request asks of the engine. `deadline` is in `time.monotonic` seconds, None for no end.

    `cancelled` is set when nobody waits for the answer any more: the engine then does not begin it.
    """

    id: str
    spec: Spec
    backend: str
    tensors: dict[str, RawTensor]
    timings: Timings
    deadline: float | None = None
    priority: int = 0
    cancelled: bool = False

    def remaining(self) -> float | None:
        """Seconds to the deadline, at least 0; None for no end."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(frozen=True)
class Answer:
    """What the engine gives back: tensors by name, in the order of `Spec.outputs`, and what is not a tensor."""

    tensors: dict[str, RawTensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1  # requests that ran in the same launch
