"""The one object that travels with a request from its head to its answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from flashpoint_kernels.spec import Spec
from flashpoint_server.ipc.messages import Prove, Submit, pack_options
from flashpoint_server.ipc.price import Price
from flashpoint_server.ipc.staging import Staging

PARTS = ("decode", "queue", "compute", "encode")  # of a request's way


@dataclass(eq=False)
class Timings:
    """When each part of the way began, in `time.perf_counter` seconds; `decode` includes the body's arrival."""

    decode: float
    queue: float = 0.0
    compute: float = 0.0
    encode: float = 0.0
    done: float = 0.0
    copy_in: float = 0.0  # seconds of computing that went to copies to a GPU, and from it
    copy_out: float = 0.0

    def stages(self) -> dict[str, float]:
        """Seconds of each part, copies counted apart from computing."""
        return {
            "decode": self.queue - self.decode,
            "queue": self.compute - self.queue,
            "copy_in": self.copy_in,
            "compute": self.encode - self.compute - self.copy_in - self.copy_out,
            "copy_out": self.copy_out,
            "encode": self.done - self.encode,
        }

    def spans(self) -> dict[str, tuple[float, float]]:
        """When each of these parts began and ended, in `time.perf_counter` seconds."""
        marks = (self.decode, self.queue, self.compute, self.encode, self.done)
        return {name: (marks[i], marks[i + 1]) for i, name in enumerate(PARTS)}

    def durations(self) -> dict[str, float]:
        """Milliseconds of what a caller is told of: decode, queue, compute with its copies, encode."""
        return {name: round((end - began) * 1000, 3) for name, (began, end) in self.spans().items()}


@dataclass(eq=False, kw_only=True)
class Job(ABC):
    """What one request asks of an engine. `deadline` is in `time.monotonic` seconds, None for no end."""

    id: str
    staging: Staging
    timings: Timings
    price: Price
    deadline: float | None = None
    priority: int = 0

    @abstractmethod
    def message(self, number: int, rank: float) -> Submit | Prove:
        """To the engine, which knows the job by `number`."""

    def remaining(self) -> float | None:
        """Seconds to the deadline, at least 0; None for no end."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(eq=False, kw_only=True)
class AttentionJob(Job):
    """Attention or its gradients, on `backend`."""

    spec: Spec
    backend: str

    def message(self, number: int, rank: float) -> Submit:
        return Submit(
            id=number,
            request_id=self.id,
            direction=self.spec.direction,
            options=pack_options(self.spec.options),
            backend=self.backend,
            segment=self.staging.slot.segment.number,
            inputs=self.staging.described(self.staging.inputs),
            outputs=self.staging.described(self.staging.outputs),
            mark=self.staging.slot.mark_at,
            flops=self.price.flops,
            seconds=self.price.seconds,
            rank=rank,
            deadline=self.deadline,
        )


@dataclass(eq=False, kw_only=True)
class ProofJob(Job):
    """A verification: of the tensors that are staged, with `request` their options, or of what `request` draws."""

    request: bytes

    def message(self, number: int, rank: float) -> Prove:
        return Prove(
            id=number,
            request_id=self.id,
            request=self.request,
            segment=self.staging.slot.segment.number,
            inputs=self.staging.described(self.staging.inputs),
            mark=self.staging.slot.mark_at,
            flops=self.price.flops,
            seconds=self.price.seconds,
            rank=rank,
            deadline=self.deadline,
        )


@dataclass(frozen=True)
class Answer:
    """What is not a tensor of an answer: the tensors are written in the job's staging memory.

    `launch` numbers the launch it was computed in. `report` is the answer of a verification, a VerifyReport in JSON.
    """

    metadata: dict[str, Any]
    batch_size: int
    launch: int = 0
    report: bytes = b""
