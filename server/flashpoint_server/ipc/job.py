"""The job of a request: the object that goes from its route to an engine and back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashpoint_contract.spec import Spec
from flashpoint_server.exchange import Timings
from flashpoint_server.ipc.messages import (
    AskCaches,
    CacheRecord,
    Held,
    Prove,
    Recall,
    Save,
    SavedRecord,
    Submit,
    pack_options,
)
from flashpoint_server.ipc.price import Price
from flashpoint_server.ipc.staging import Staging


@dataclass(eq=False, kw_only=True)
class Job(ABC):
    """The work of one request for an engine. `deadline` is in `time.monotonic` seconds; None means no deadline."""

    id: str
    staging: Staging
    timings: Timings
    price: Price
    deadline: float | None = None
    priority: int = 0
    incarnation: int = 0  # engine that holds the job's caches or forward; 0: any engine
    lost: str = "cache_lost"  # error code if that engine is gone

    @abstractmethod
    def message(self, number: int, rank: float) -> Submit | Prove | AskCaches:
        """Return the message to the engine, with the job's `number` on the channel."""

    @property
    def needs_held(self) -> bool:
        """Whether the job uses caches or a saved forward, which only its engine has."""
        return False

    def remaining(self) -> float | None:
        """Return the seconds to the deadline, at least 0; None if there is no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(eq=False, kw_only=True)
class AttentionJob(Job):
    """Attention or its gradients on `backend`; with `held`, over caches.

    `saved` is set if the forward is to be saved, or if the gradients are those of a saved forward.
    """

    spec: Spec
    backend: str
    held: Held | None = None
    saved: Save | Recall | None = None

    @property
    def needs_held(self) -> bool:
        return self.held is not None or isinstance(self.saved, Recall)

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
            held=self.held,
            saved=self.saved,
        )


@dataclass(eq=False, kw_only=True)
class CacheJob(Job):
    """A call about caches or saved forwards that computes nothing: see `AskCaches`."""

    what: str
    owner: str
    caches: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    quota: int | None = None

    @property
    def needs_held(self) -> bool:
        return bool(self.caches)

    def message(self, number: int, rank: float) -> AskCaches:
        return AskCaches(
            id=number,
            request_id=self.id,
            what=self.what,
            owner=self.owner,
            caches=self.caches,
            arguments=self.arguments,
            key=self.key,
            quota=self.quota,
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
    """A verification of the staged tensors, with their options in `request`, or of a problem that `request` draws.

    `progress` is called with each VerifyProgress in JSON. The first call means that the verification has started.
    """

    request: bytes
    progress: Callable[[bytes], None] | None = None

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
            told=self.progress is not None,
        )


@dataclass(frozen=True)
class JobResult:
    """The parts of an answer other than tensors, which the engine writes into the job's staging memory.

    `launch` is the number of the job's launch. `report` is the VerifyReport of a verification, in JSON. `caches` and
    `saved` are the answer to a CacheJob. `incarnation` identifies the engine that answered.
    """

    metadata: dict[str, Any]
    batch_size: int
    launch: int = 0
    report: bytes = b""
    caches: tuple[CacheRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    incarnation: int = 0
