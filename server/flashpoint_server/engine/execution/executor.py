"""Run tasks on the device, and send the answers. End the process when a task hangs."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import structlog

from flashpoint_contract.schemas.verify import VerifyProgress
from flashpoint_kernels import Problem
from flashpoint_kernels.cpu_backend.spans import Part
from flashpoint_server.engine.caches.attending import CachedCall
from flashpoint_server.engine.caches.cache import StoredCache
from flashpoint_server.engine.caches.cache_calls import execute
from flashpoint_server.engine.caches.weighing import WeighingPart
from flashpoint_server.engine.execution.device import NO_COPIES, ComputeDevice, DeviceLostError, Stages
from flashpoint_server.engine.execution.kernel_threads import KernelThreads
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, OutOfMemoryError, account
from flashpoint_server.engine.scheduling.tasks import Ask, BenchmarkSlice, Compute, Launch, SaveForward, Split, Task
from flashpoint_server.engine.scheduling.waiting import Budget
from flashpoint_server.ipc.bodies import CacheCall, SavedCall
from flashpoint_server.ipc.messages import (
    MOST_ERRORS,
    CacheRecord,
    CallReply,
    Done,
    Failed,
    SavedRecord,
    Verified,
    VerifyProgressed,
)
from flashpoint_server.observability.lines import LINES
from flashpoint_server.refusal import Refusal

MEMORY_SECONDS = 0.1  # seconds between two reads of the memory that the device uses
TOLD_SECONDS = 0.1  # seconds between two progress messages of a verification

log = structlog.stdlib.get_logger("flashpoint.engine")


class Watchdog:
    """A context that kills the process with SIGALRM when it takes longer than `limit` seconds.

    A thread enters it once at a time. The kernel sends the signal, because a hanging thread may hold Python's lock for
    ever.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._began: dict[int, float] = {}  # when each thread entered, in order of time: the first is the oldest

    def __enter__(self) -> None:
        with self._lock:
            self._began[threading.get_ident()] = time.monotonic()
            if len(self._began) == 1:
                signal.setitimer(signal.ITIMER_REAL, self._limit)

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with self._lock:
            first = next(iter(self._began)) == thread
            del self._began[thread]
            if first:  # otherwise the timer belongs to a thread that entered before
                oldest = next(iter(self._began.values()), None)
                left = 0.0 if oldest is None else max(oldest + self._limit - time.monotonic(), 1e-6)
                signal.setitimer(signal.ITIMER_REAL, left)


class Executor:
    """Runs tasks and sends answers. The process is killed when a task runs longer than `hang_timeout` seconds.

    `answered` is called with each computed attention request before it is answered, while its tensors are in place.
    """

    def __init__(
        self, device: ComputeDevice, budget: Budget, hang_timeout: float,
        answered: Callable[[EngineRequest], None] | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self._answered = answered
        self._budget = budget
        self._watchdog = Watchdog(hang_timeout)
        self._memory, self._looked = 0, -MEMORY_SECONDS  # the last read, and its time
        self._kernels = KernelThreads(device.cores - 1)
        self._numbers = itertools.count(1 + secrets.randbits(62))  # launch numbers, which must be unique for traces

    def run(self, task: Task) -> Exception | None:
        """Run a task. Return the error of a Compute, Split or SaveForward, for `Scheduler.finish`; None otherwise.

        The other tasks answer their requests themselves, also if they fail.
        """
        try:
            match task:
                case Compute():
                    with self._watchdog:
                        self._run_part(task.problem, task.requests[0].backend)
                case Split():
                    self._cut(task)
                case SaveForward():
                    with self._watchdog:
                        self.device.keep(task.requests[0])
        except Exception as error:
            return error
        match task:
            case Ask():
                self._ask(task.requests[0])
            case Launch():
                self._launch(task.requests)
            case BenchmarkSlice():
                with self._watchdog:
                    task.plugin.step()
        return None

    def answer(self, request: EngineRequest, size: int = 1, stages: Stages = NO_COPIES, number: int = 0) -> None:
        """Answer a request whose parts have all ended, or that has failed.

        It was computed in launch `number`, a new one if this is 0, of `size` requests.
        """
        if request.failure is not None:
            request.worker.send(_failed(request))
            return
        spec, planned = request.spec, request.planned
        assert planned is not None
        if not planned.metadata:
            kernel = self.device.info.kernel(spec.dtype, spec.direction) if request.backend == "cpu" else None
            planned.metadata = {"backend": request.backend, **({"kernel": kernel} if kernel else {})}
        metadata = planned.metadata.copy()
        if spec.options.dropout_p:
            metadata["dropout_seed"] = request.seed
        metadata |= request.answers
        if request.saved_forward is not None:
            metadata["saved"] = request.saved_forward.serial
        ended, number = time.perf_counter(), number or next(self._numbers)
        if ended >= self._looked + MEMORY_SECONDS:
            self._looked, self._memory = ended, self.device.memory()
        if self._answered is not None:
            self._answered(request)
        request.worker.send(
            Done(
                request.submit.id, metadata, request.began, ended, size, *stages, self._memory, number, LINES.dropped(),
                *(request.about or ()),
            )
        )  # fmt: skip

    def end_if_lost(self, by: str) -> None:
        """End the process if the device does not work any more. `by` says which work may have broken it."""
        if self.device.lost():
            _lost(by=by)

    def _run_part(self, problem: Problem | Part | WeighingPart, backend: str) -> None:
        try:
            self.device.run(problem, backend)
        except OutOfMemoryError:
            self.device.empty_cache()
            self.device.run(problem, backend)

    def _cut(self, task: Split) -> None:
        request = task.requests[0]
        if not request.over_caches:
            request.cut(self.device.parts, self._budget)
            return
        with self._watchdog:
            parts = self._cut_calls(task.requests, task.cores)
            if len(parts) == 1 and not request.unwanted:
                run = partial(self._run_part, parts[0], request.backend)
                if task.cores > 1 or task.long:
                    run()
                else:  # kernel threads leave one core to Python code (kernel_threads.py)
                    self._kernels.run(run)
                parts = ()
            request.add(parts)

    def _cut_calls(self, requests: Sequence[EngineRequest], cores: int) -> Sequence[Problem | Part]:
        """Write the new tokens of calls over stored caches into the caches. Return the parts to compute, of all calls.

        A call that fails gets `failure` and has no parts; if there is only one call, its error is raised.
        """
        ready: list[tuple[EngineRequest, CachedCall, Sequence[StoredCache]]] = []
        for request in requests:
            try:
                ready.append((request, *self._write(request)))
            except Exception as error:
                if len(requests) == 1:
                    raise
                request.failure = request.failure or error
        if not ready:
            return ()
        backend = ready[0][0].backend
        sequences, parts = self.device.attend([(call, caches) for _, call, caches in ready], backend, cores)
        for (request, call, caches), (rows, seed) in zip(ready, sequences, strict=True):
            request.of_rows(rows, seed, self._budget)
            if call.of.weights is not None:
                request.weighing = self.device.weighing(call, caches, backend)
            if (reads := self.device.caches.reads(caches, call.cache_ref.layer)) is not None:
                request.answers["reads"] = reads
        return parts

    def _write(self, request: EngineRequest) -> tuple[CachedCall, Sequence[StoredCache]]:
        """Write the new tokens of a call over caches. Return the call and its caches. Raises Refusal."""
        tensors = self.device.call_tensors(request)
        call = CachedCall.of_request(tensors, request.submit, request.inputs, request.memory)
        caches = self.device.write(call)
        request.answers["lengths"] = [cache.tracks[call.cache_ref.layer].length for cache in caches]
        return call, caches

    def _ask(self, request: EngineRequest) -> None:
        """Execute a call about caches or saved forwards, and answer it."""
        caches: list[CacheRecord] = []
        saved: list[SavedRecord] = []
        try:
            with self._watchdog, self.device.in_order():
                match request.submit.body:
                    case CacheCall() as call:
                        caches = execute(self.device.caches, call, request.submit, request.memory)
                    case SavedCall() as about:
                        saved = self.device.saved.execute(about)
        except Exception as error:
            self._fail([request], OutOfMemoryError() if isinstance(error, MemoryError) else error)
        else:
            for reply in CallReply.parts(request.submit.id, caches, saved, request.began, time.perf_counter()):
                request.worker.send(reply)

    def _launch(self, batch: Sequence[EngineRequest]) -> None:
        if batch[0].planned is None:
            self._prove(batch[0])
        elif written := [request for request in batch if self._writes(request)]:
            self._solve(written, splits=0, tries=2)

    def _writes(self, request: EngineRequest) -> bool:
        """Write the new tokens of a call over caches, once before all attempts to compute it.

        Return False if this failed; the request was then answered.
        """
        if request.over_caches:
            try:
                request.call, _ = self._write(request)
            except Exception as error:
                self._fail([request], error)
                return False
        return True

    def _prove(self, request: EngineRequest) -> None:
        try:
            with self._watchdog:
                report = self.device.verify(request, self._telling(request))
        except Exception as error:
            self._fail([request], error)
        else:
            request.worker.send(Verified(request.submit.id, report, request.began, time.perf_counter()))

    def _telling(self, request: EngineRequest) -> Callable[[VerifyProgress], None]:
        """Return a function that sends a verification's progress, if its caller has asked for progress messages.

        The function raises `request.failure` if this is set, which ends the verification.
        """
        last = -TOLD_SECONDS

        def tell(progress: VerifyProgress) -> None:
            nonlocal last
            if request.failure is not None:  # the scheduler sets it to end a cancelled verification
                raise request.failure
            if request.verification.wants_progress and (now := time.monotonic()) >= last + TOLD_SECONDS:
                last = now
                request.worker.send(VerifyProgressed(request.submit.id, progress.model_dump_json().encode()))

        return tell

    def _solve(self, batch: Sequence[EngineRequest], *, splits: int, tries: int) -> None:
        """Compute a batch of requests, and answer them.

        If memory runs out, retry with each half of the batch; after another error, with each request alone.
        """
        failure: Exception | None = None
        try:
            with self._watchdog:
                seeds, stages = self.device.launch(batch)
        except Exception as error:
            failure = error
        if failure is None:
            batch[0].about, number = account(batch, self._budget, splits), next(self._numbers)
            for request, seed in zip(batch, seeds, strict=True):
                request.seed = seed
                self.answer(request, len(batch), stages, number)
        elif isinstance(failure, OutOfMemoryError) and (len(batch) > 1 or tries > 1):
            failure.__traceback__ = None  # the traceback's frames refer to tensors whose memory must be freed
            self.device.empty_cache()
            if len(batch) == 1:
                self._solve(batch, splits=splits, tries=tries - 1)
            else:
                half = len(batch) // 2
                for some in (batch[:half], batch[half:]):
                    self._solve(some, splits=splits + 1, tries=tries)
        elif isinstance(failure, DeviceLostError) or len(batch) == 1:
            self._fail(batch, failure)
        else:
            failure.__traceback__ = None
            for request in batch:
                self._solve([request], splits=splits, tries=tries)

    def _fail(self, batch: Sequence[EngineRequest], error: Exception) -> None:
        for request in batch:
            request.failure = error
            self.answer(request)


def _failed(request: EngineRequest) -> Failed:
    """Return the message to send for a failed request. End the process if the failure is DeviceLostError."""
    submit, error = request.submit, request.failure
    assert error is not None
    if isinstance(error, DeviceLostError):
        _lost(request_id=submit.request_id, error=str(error))
    if isinstance(error, Refusal):
        reply = Failed(submit.id, error.code, error.detail, list(error.errors[:MOST_ERRORS]))
    elif isinstance(error, OutOfMemoryError):
        reply = Failed(
            submit.id,
            "out_of_memory",
            "the device ran out of memory for this request; retry, or send a smaller request",
            [],
        )
    else:
        log.error("failed", request_id=submit.request_id, error=type(error).__name__, exc_info=error)
        reply = Failed(submit.id, "internal_error", "the server failed: a bug, logged by its engine", [])
    error.__traceback__ = None  # the request refers to the error, whose traceback would keep tensors alive
    return reply


def _lost(**about: str) -> NoReturn:
    """End the process. Running requests are lost with the device; another engine gets those that had not started."""
    log.critical("device lost", **about)
    LINES.flush()
    os._exit(1)
