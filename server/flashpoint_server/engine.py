"""The seam between HTTP and compute: who runs jobs, and one thread that does.

    STARTING → READY → STOPPED
        ↘ FAILED

A job waits in order of its priority and its age, is begun unless nobody waits for it or it is late, and is answered
once. Nothing of torch is imported before `start`, and then by the engine's own thread.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import structlog

from flashpoint_server.job import Answer, Job
from flashpoint_server.refusal import Refusal, out_of_time

if TYPE_CHECKING:
    from flashpoint_server.device import Device

log = structlog.stdlib.get_logger("flashpoint.engine")

# One step of priority is worth this much waiting, so that no job starves: one of priority 0 that is 9 s older than one
# of priority 9 goes first.
PRIORITY_SECONDS = 1.0


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class DeviceInfo:
    """`name` as torch has it ("cpu", "cuda:0"), `title` for people, bytes of memory, and the backends it has proven."""

    name: str
    title: str
    memory: int
    backends: tuple[str, ...]


class Engine(Protocol):
    """Runs jobs on one device."""

    state: State
    device: DeviceInfo | None  # what `start` found; None before READY
    failure: str | None  # why it is FAILED

    def start(self) -> None:
        """Open the device, prove its backends, and become READY, or FAILED. Returns at once."""

    def stop(self) -> None:
        """Refuse what waits and what runs: nobody waits for it any more."""

    def join(self, timeout: float) -> bool:
        """Wait `timeout` seconds for what runs after `stop`; whether it has ended."""

    async def submit(self, job: Job) -> Answer:
        """The answer. Raises Refusal; cancelled, the job is dropped where it waits."""


class ThreadEngine:
    """An `Engine` in a thread of this process."""

    def __init__(self, device: str) -> None:
        self.state = State.STARTING
        self.device: DeviceInfo | None = None
        self.failure: str | None = None
        self._asked = device
        self._waiting: list[_Entry] = []
        self._running: _Entry | None = None
        self._wake = threading.Condition()
        self._numbers = itertools.count()
        # A daemon: a kernel cannot be interrupted, and must not keep a stopped server alive.
        self._thread = threading.Thread(target=self._work, name="flashpoint-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self.state = State.STOPPED
            unanswered = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting = []
            self._wake.notify_all()
        for entry in unanswered:
            entry.settle(Refusal("draining", "the server stopped before this request was done"))

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    async def submit(self, job: Job) -> Answer:
        job.timings.queue = time.perf_counter()
        future = asyncio.get_running_loop().create_future()
        rank = time.monotonic() - job.priority * PRIORITY_SECONDS
        entry = _Entry(rank, next(self._numbers), job, future)
        with self._wake:
            if self.state is not State.READY:
                raise Refusal("not_ready", f"the engine is {self.state.value}")
            heapq.heappush(self._waiting, entry)
            self._wake.notify()
        try:
            answer: Answer = await future
            return answer
        except asyncio.CancelledError:
            job.cancelled = True
            self._forget(entry)
            raise

    def _forget(self, entry: _Entry) -> None:
        """Let go of a cancelled job's memory now, not when its turn would come."""
        with self._wake:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)

    def _work(self) -> None:
        try:
            from flashpoint_server.device import Device  # imports torch

            device = Device.open(self._asked)
            device.prove()
        except Exception as error:
            log.exception("engine failed to start", device=self._asked)
            self.failure = f"{type(error).__name__}: {error}"
            self.state = State.FAILED
            return
        self.device = device.info
        with self._wake:
            if self.state is State.STARTING:
                self.state = State.READY
        log.info("ready", device=device.info.name, title=device.info.title, backends=device.info.backends)
        while self._run_next(device):
            pass

    def _run_next(self, device: Device) -> bool:
        """Run the next job; False when there will be none. All that it holds is let go of when it returns."""
        with self._wake:
            while not self._waiting and self.state is State.READY:
                self._wake.wait()
            if not self._waiting:
                return False
            entry = self._running = heapq.heappop(self._waiting)
        try:
            self._run(device, entry)
        finally:
            self._running = None
        return True

    @staticmethod
    def _run(device: Device, entry: _Entry) -> None:
        job = entry.job
        if job.cancelled:
            return
        if job.late:
            entry.settle(out_of_time())
            return
        log.debug("begin", request_id=job.id, backend=job.backend)
        try:
            entry.settle(device.run(job))
        except Exception as error:
            entry.settle(error)


@dataclass(frozen=True, order=True)
class _Entry:
    """A waiting job; the least goes first."""

    rank: float
    number: int
    job: Job = field(compare=False)
    future: asyncio.Future[Answer] = field(compare=False)

    def settle(self, outcome: Answer | Exception) -> None:
        """From any thread: answer, unless the caller has gone."""

        def deliver() -> None:
            if not self.future.done():
                if isinstance(outcome, Exception):
                    self.future.set_exception(outcome)
                else:
                    self.future.set_result(outcome)

        loop = self.future.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver)
