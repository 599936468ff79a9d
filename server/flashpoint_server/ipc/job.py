"""The job of a request: its memory, the work that its route submits to an engine, and the engine's answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashpoint_contract.tensors import INDEX_TENSORS, ITEMSIZE
from flashpoint_server.ipc.bodies import SLOT, Body, CacheRef, PlacedTensor, Recall, Save
from flashpoint_server.ipc.messages import CacheRecord, Done, SavedRecord, Submit
from flashpoint_server.ipc.price import Price
from flashpoint_server.ipc.regions import Region
from flashpoint_server.ipc.staging import Layout, Pool, PoolFullError, Segment, Slot
from flashpoint_server.refusal import Refusal


@dataclass(eq=False)
class Job:
    """The work of one request for an engine: its memory, the message that the engine gets, and the answer.

    Its memory is allocated before the inputs arrive, and freed after the answer is sent: each holder calls `release`
    once. `regions` are shared memory of callers that contains some of the tensors.
    `progress` is called with each VerifyProgress in JSON. The first call means that the verification has started.
    Submitting sets `answer`, `since` (in `time.monotonic` seconds) and `queued` (in `time.perf_counter` seconds), and
    the message's `id` and `rank`. When `answer` is done, the memory of `outputs` and the fields below it have the
    engine's answer.
    """

    slot: Slot
    inputs: tuple[PlacedTensor, ...]
    outputs: tuple[PlacedTensor, ...]
    regions: tuple[Region, ...]
    message: Submit = field(init=False)
    priority: int = 0
    incarnation: int = 0  # engine that holds the job's caches or forward; 0: any engine
    lost: str = "cache_lost"  # error code if that engine is gone
    progress: Callable[[bytes], None] | None = None
    since: float = field(init=False)
    queued: float = field(init=False)
    answer: asyncio.Future[None] = field(init=False)
    done: Done = field(init=False)  # of attention
    answered_by: int = field(init=False)  # the incarnation of the engine that computed attention
    report: bytes = field(init=False)  # the VerifyReport of a verification, in JSON
    caches: list[CacheRecord] = field(init=False, default_factory=list)  # the answer to a CacheCall, so far
    saved: list[SavedRecord] = field(init=False)  # the answer to a SavedCall

    @classmethod
    def stage(cls, pool: Pool, layout: Layout) -> Job:
        """Allocate memory for a layout. Raises Refusal 429 if the pool is full, and 413 if the pool is too small."""
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

    def ask(
        self, request_id: str, body: Body, price: Price, deadline: float | None, seed: int | None = None,
        cache_ref: CacheRef | None = None, saved: Save | Recall | None = None,
    ) -> None:  # fmt: skip
        """Set the message, whose fields have these names. The engine's client sets its `id` and `rank`."""
        slot, (flops, seconds) = self.slot, price
        self.message = Submit(
            id=-1, request_id=request_id, body=body, segment=slot.segment.number, start=slot.offset, mark=slot.mark_at,
            flops=flops, seconds=seconds, rank=0.0, deadline=deadline, seed=seed, cache_ref=cache_ref, saved=saved,
        )  # fmt: skip
        if not isinstance(body, bytes):
            self.message.inputs, self.message.outputs = self.inputs, self.outputs

    @property
    def segments(self) -> tuple[Segment | Region, ...]:
        """The segments that the engine must map."""
        return (self.slot.segment, *self.regions)

    def views(self, tensors: Iterable[PlacedTensor]) -> dict[str, memoryview]:
        """Return the memory of each tensor in the slot, by name. Tensors in regions are left out."""
        memory, start, views = self.slot.segment.view, self.slot.offset, {}
        for t in tensors:
            if t.segment == SLOT:
                at = start + t.offset
                views[t.name] = memory[at : at + math.prod(t.shape) * ITEMSIZE[t.dtype]]
        return views

    def index(self, views: Mapping[str, memoryview]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the values of the index tensors, which are always among the `views` of the inputs."""
        return {t.name: np.frombuffer(views[t.name], t.dtype) for t in self.inputs if t.name in INDEX_TENSORS}

    def hold(self) -> None:
        """Add a holder. `release` must be called when the engine no longer accesses the memory."""
        self.slot.hold()
        for region in self.regions:
            region.hold()

    def release(self) -> None:
        self.slot.release()
        for region in self.regions:
            region.release()

    def remaining(self) -> float | None:
        """Return the seconds to the deadline, at least 0; None if there is no deadline."""
        deadline = self.message.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())
