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
    """The work of one request for an engine. `deadline` is in `time.monotonic` seconds; None means no deadline.

    `progress` is called with each VerifyProgress in JSON. The first call means that the verification has started.
    Submitting sets `answer` and `since`, in `time.monotonic` seconds. `number` is the job's id on an engine's channel.
    """

    id: str
    body: Body
    staging: Staging
    timings: Timings
    price: Price
    deadline: float | None = None
    priority: int = 0
    incarnation: int = 0  # engine that holds the job's caches or forward; 0: any engine
    lost: str = "cache_lost"  # error code if that engine is gone
    progress: Callable[[bytes], None] | None = None
    answer: asyncio.Future[JobResult] = field(init=False)
    since: float = field(init=False)
    number: int = field(init=False, default=-1)
    records: list[CacheRecord] = field(init=False, default_factory=list)  # from the CallReply messages so far

    def message(self, rank: float) -> Submit:
        """Return the message that submits the job to an engine. `rank` orders the engine's queue: see `Submit`."""
        return Submit(
            id=self.number,
            request_id=self.id,
            body=self.body,
            segment=self.staging.slot.segment.number,
            inputs=self.staging.described(self.staging.inputs),
            outputs=self.staging.described(self.staging.outputs),
            mark=self.staging.slot.mark_at,
            flops=self.price.flops,
            seconds=self.price.seconds,
            rank=rank,
            deadline=self.deadline,
        )

    def remaining(self) -> float | None:
        """Return the seconds to the deadline, at least 0; None if there is no deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline
