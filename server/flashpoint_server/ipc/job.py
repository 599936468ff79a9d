"""The job of a request: the work that its route submits to an engine, and the engine's answer without its tensors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashpoint_server.ipc.bodies import Body
from flashpoint_server.ipc.messages import CacheRecord, SavedRecord, Submit
from flashpoint_server.ipc.price import Price
from flashpoint_server.ipc.staging import Staging


@dataclass(eq=False, kw_only=True)
class Job:
    """The work of one request for an engine: `message` is what the engine gets, the other fields stay here.

    `progress` is called with each VerifyProgress in JSON. The first call means that the verification has started.
    Submitting sets `answer`, `since` (in `time.monotonic` seconds) and `queued`, and the message's `id` and `rank`.
    The engine writes the answer's tensors into `staging`. When `answer` is done, the fields from `began` on have the
    rest. `queued`, `began` and `ended` are in `time.perf_counter` seconds; copies to and from a GPU took `copy_in` and
    `copy_out` seconds of this time.
    """

    message: Submit
    staging: Staging
    priority: int = 0
    incarnation: int = 0  # engine that holds the job's caches or forward; 0: any engine
    lost: str = "cache_lost"  # error code if that engine is gone
    progress: Callable[[bytes], None] | None = None
    answer: asyncio.Future[None] = field(init=False)
    since: float = field(init=False)
    queued: float = field(init=False, default=0.0)
    began: float = field(init=False, default=0.0)
    ended: float = field(init=False, default=0.0)
    copy_in: float = field(init=False, default=0.0)
    copy_out: float = field(init=False, default=0.0)
    metadata: dict[str, Any] = field(init=False)  # of attention
    batch_size: int = field(init=False, default=1)
    launch: int = field(init=False, default=0)  # the number of its launch
    report: bytes = field(init=False, default=b"")  # the VerifyReport of a verification, in JSON
    caches: list[CacheRecord] = field(init=False, default_factory=list)  # the answer to a CacheCall, so far
    saved: list[SavedRecord] = field(init=False, default_factory=list)  # the answer to a SavedCall
    answered_by: int = field(init=False, default=0)  # the incarnation of the engine that computed attention

    @classmethod
    def of(
        cls, request_id: str, body: Body, staging: Staging, price: Price, deadline: float | None = None, **here: Any
    ) -> Job:
        """Return the job of a request. `deadline` is as in `Submit`; `here` are the fields that stay here."""
        slot = staging.slot
        number, rank = -1, 0.0  # until the job is sent
        message = Submit(
            number, request_id, body, slot.segment.number, staging.inputs, staging.outputs, slot.mark_at, *price, rank,
            deadline,
        )  # fmt: skip
        return cls(message=message, staging=staging, **here)

    def remaining(self) -> float | None:
        """Return the seconds to the deadline, at least 0; None if there is no deadline."""
        deadline = self.message.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    @property
    def late(self) -> bool:
        return self.remaining() == 0.0
