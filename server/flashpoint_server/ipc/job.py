"""The one object that travels with a request from its head to its answer."""

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
    """One request's work for an engine. `deadline` is in `time.monotonic` seconds, None for no end."""

    id: str
    staging: Staging
    timings: Timings
    price: Price
    deadline: float | None = None
    priority: int = 0
    incarnation: int = 0  # of the engine that holds what it uses; 0 for any engine
    lost: str = "cache_lost"  # the code of its refusal where that engine is gone

    @abstractmethod
    def message(self, number: int, rank: float) -> Submit | Prove | AskCaches:
        """To the engine, which knows the job by `number`."""

    @property
    def needs_held(self) -> bool:
        """Whether it is about caches or a saved forward that its engine holds."""
        return False

    def remaining(self) -> float | None:
        """Seconds to the deadline, at least 0; None for no end."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(eq=False, kw_only=True)
class AttentionJob(Job):
    """Attention or its gradients, on `backend`; over caches where `held` names some.

    `saved`: the forward is kept, or the gradient is that of one that was.
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
    """A call about caches or saved forwards that computes nothing; see `AskCaches`."""

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
    """A verification: of the tensors that are staged, with `request` their options, or of what `request` draws.

    `progress` is called with each VerifyProgress, in JSON; the first says that it has begun.
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
    """The parts of an answer that are no tensors: the tensors are written in the job's staging memory.

    `launch` numbers the launch it was computed in. `report` is the answer of a verification, a VerifyReport in JSON.
    `caches` and `saved` are those that a CacheJob is about. `incarnation` is that of the engine that answered.
    """

    metadata: dict[str, Any]
    batch_size: int
    launch: int = 0
    report: bytes = b""
    caches: tuple[CacheRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    incarnation: int = 0
