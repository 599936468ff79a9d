"""The job of a request: the work that its route submits to an engine, and the engine's answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashpoint_server.exchange import Timings
from flashpoint_server.ipc.bodies import Body
from flashpoint_server.ipc.messages import CacheRecord, SavedRecord, Submit
from flashpoint_server.ipc.price import Price
from flashpoint_server.ipc.staging import Staging


@dataclass(frozen=True)
class JobResult:
    """The answer to a job, without its tensors: the engine writes those into the job's staging memory.

    `launch` is the number of the job's launch. `report` is the VerifyReport of a verification, in JSON. `caches` and
    `saved` are the answer to a CacheCall or a SavedCall. `incarnation` identifies the engine that answered.
    """

    metadata: dict[str, Any]
    batch_size: int
    launch: int = 0
    report: bytes = b""
    caches: tuple[CacheRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    incarnation: int = 0


@dataclass(eq=False, kw_only=True)
class Job:
    """The work of one request for an engine: `message` is what the engine gets, the other fields stay here.

    `progress` is called with each VerifyProgress in JSON. The first call means that the verification has started.
    Submitting sets `answer` and `since`, in `time.monotonic` seconds, and the message's `id` and `rank`.
    """

    message: Submit
    staging: Staging
    timings: Timings
    priority: int = 0
    incarnation: int = 0  # engine that holds the job's caches or forward; 0: any engine
    lost: str = "cache_lost"  # error code if that engine is gone
    progress: Callable[[bytes], None] | None = None
    answer: asyncio.Future[JobResult] = field(init=False)
    since: float = field(init=False)
    records: list[CacheRecord] = field(init=False, default_factory=list)  # from the CallReply messages so far

    @classmethod
    def of(
        cls, request_id: str, body: Body, staging: Staging, price: Price, deadline: float | None = None, **here: Any
    ) -> Job:
        """Return the job of a request. `deadline` is as in `Submit`; `here` are the fields that stay here."""
        slot = staging.slot
        inputs, outputs = staging.inputs, staging.outputs
        number, rank = -1, 0.0  # until the job is sent
        message = Submit(
            number, request_id, body, slot.segment.number, inputs, outputs, slot.mark_at, *price, rank, deadline
        )
        return cls(message=message, staging=staging, **here)

    def remaining(self) -> float | None:
        """Return the seconds to the deadline, at least 0; None if there is no deadline."""
        deadline = self.message.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    @property
    def late(self) -> bool:
        return self.remaining() == 0.0
