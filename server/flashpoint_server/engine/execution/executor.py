"""Run tasks on the device, and send the answers."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import structlog

from flashpoint_contract.schemas.verify import VerifyProgress
from flashpoint_kernels import Problem
from flashpoint_server.engine.caches.attending import CachedCall
from flashpoint_server.engine.caches.cache import StoredCache
from flashpoint_server.engine.caches.cache_calls import execute
from flashpoint_server.engine.caches.parts import CachedPart
from flashpoint_server.engine.execution.device import NO_COPIES, DeviceLostError, Stages, TorchDevice
from flashpoint_server.engine.execution.kernel_threads import KernelThreads
from flashpoint_server.engine.scheduling.entry import Entry, OutOfMemoryError, account
from flashpoint_server.engine.scheduling.tasks import Ask, BenchmarkSlice, Compute, Launch, SaveForward, Split, Task
from flashpoint_server.engine.scheduling.waiting import Budget
from flashpoint_server.ipc.bodies import CacheCall, SavedCall
from flashpoint_server.ipc.messages import (
    MOST_ERRORS,
    Batch,
    CacheRecord,
    CallReply,
    Done,
    Failed,
    SavedRecord,
    Verified,
    VerifyProgressed,
)
from flashpoint_server.observability.lines import LINES
from flashpoint_server.processes.parent import Watchdog
from flashpoint_server.refusal import Refusal

TOLD_SECONDS = 0.1  # between two progress messages of a verification

log = structlog.stdlib.get_logger("flashpoint.engine")


class Executor:
    """Runs tasks; see the module. The process is killed when a task runs longer than `hang_timeout` seconds."""

    def __init__(self, device: TorchDevice, budget: Budget, hang_timeout: float) -> None:
        self.device = device
        self._budget = budget
        self._watchdog = Watchdog(hang_timeout)
        self._kernels = KernelThreads(device.cores - 1)
        self._numbers = itertools.count(1 + secrets.randbits(62))  # of launches; they must be unique, for traces

    def run(self, task: Task) -> Exception | None:
        """Run a task. Return the error of a part or of cutting; the requests of a launch are answered here."""
        match task:
            case Compute():
                return self._compute(task.entries[0], task.problem)
            case Split():
                return self._cut(task)
            case SaveForward():
                return self._keep(task.entries[0])
            case Ask():
                self._ask(task.entries[0])
            case Launch():
                self._launch(task.entries)
            case BenchmarkSlice():
                with self._watchdog.watched():
                    task.plugin.step()
        return None

    def answer(self, entry: Entry) -> None:
        """Answer a request whose parts have all ended, or that failed."""
        if entry.failure is None:
            self._done(entry, 1, NO_COPIES, entry.alone(self._budget), next(self._numbers))
        else:
            entry.peer.send(_failed(entry))

    def end_if_lost(self, by: str) -> None:
        """End the process if the device does not work any more. `by` says what may have broken it."""
        if self.device.lost():
            _lost(by=by)

    def _compute(self, entry: Entry, problem: Problem) -> Exception | None:
        try:
            with self._watchdog.watched():
                self._run_part(problem, entry.attention.backend)
        except Exception as error:
            return error
        return None

    def _run_part(self, problem: Problem | CachedPart, backend: str) -> None:
        try:
            self.device.run(problem, backend)
        except OutOfMemoryError:
            self.device.empty_cache()
            self.device.run(problem, backend)

    def _cut(self, task: Split) -> Exception | None:
        entry = task.entries[0]
        try:
            if not entry.over_caches:
                task.group.add(entry.cut(self.device.parts))
                return None
            with self._watchdog.watched():
                parts = self._cut_calls(task.entries, task.cores)
                if len(parts) == 1 and not task.group.unwanted:
                    run = partial(self._run_part, parts[0], entry.attention.backend)
                    if task.cores > 1 or task.long:
                        run()
                    else:  # other requests need the cores, too
                        self._kernels.run(run)
                    parts = ()
                task.group.add(parts)
        except Exception as error:
            return error
        return None

    def _cut_calls(self, entries: Sequence[Entry], cores: int) -> Sequence[Problem | CachedPart]:
        """Write the tokens of calls over caches. Return the parts of all calls; one that fails has none."""
        ready: list[tuple[Entry, CachedCall, Sequence[StoredCache]]] = []
        for entry in entries:
            try:
                call = self._call(entry)
                ready.append((entry, call, self.device.write(call)))
            except Exception as error:
                if len(entries) == 1:
                    raise
                entry.failure = entry.failure or error
        if not ready:
            return ()
        backend = ready[0][0].attention.backend
        sequences, parts = self.device.attend([(call, caches) for _, call, caches in ready], backend, cores)
        for (entry, call, caches), (rows, seed) in zip(ready, sequences, strict=True):
            entry.of_rows(rows, seed)
            entry.reads = self.device.caches.reads(caches, call.cache_ref.layer)
        return parts

    def _call(self, entry: Entry) -> CachedCall:
        """Return the call over caches of an entry. Raises Refusal 422."""
        device, cache_ref = self.device, entry.attention.cache_ref
        assert cache_ref is not None
        of = device.call_tensors
        return CachedCall(entry.tensors(of) if device.is_cpu else of(entry), cache_ref)

    def _keep(self, entry: Entry) -> Exception | None:
        try:
            with self._watchdog.watched():
                self.device.keep(entry)
        except Exception as error:
            return error
        return None

    def _ask(self, entry: Entry) -> None:
        """Execute a call about caches or saved forwards, and answer it."""
        caches: list[CacheRecord] = []
        saved: list[SavedRecord] = []
        try:
            with self._watchdog.watched(), self.device.in_order():
                match entry.submit.body:
                    case CacheCall() as call:
                        caches = execute(self.device.caches, call, entry.submit, entry.memory)
                    case SavedCall() as about:
                        saved = self.device.saved.execute(about)
        except Exception as error:
            self._fail([entry], OutOfMemoryError() if isinstance(error, MemoryError) else error)
        else:
            for told in CallReply.parts(entry.submit.id, caches, saved, entry.began, time.perf_counter()):
                entry.peer.send(told)

    def _launch(self, batch: Sequence[Entry]) -> None:
        if batch[0].planned is None:
            self._prove(batch[0])
        elif written := [entry for entry in batch if self._writes(entry)]:
            self._solve(written, splits=0, tries=2)

    def _writes(self, entry: Entry) -> bool:
        """Write the new tokens of a call over caches, once for all tries.

        Return False if it failed and was answered.
        """
        if entry.over_caches:
            try:
                entry.call = self._call(entry)
                self.device.write(entry.call)
            except Exception as error:
                self._fail([entry], error)
                return False
        return True

    def _prove(self, entry: Entry) -> None:
        try:
            with self._watchdog.watched():
                report = self.device.verify(entry, self._telling(entry))
        except Exception as error:
            self._fail([entry], error)
        else:
            entry.peer.send(Verified(entry.submit.id, report, entry.began, time.perf_counter()))

    def _telling(self, entry: Entry) -> Callable[[VerifyProgress], None]:
        """Return a function that ends a verification when nobody waits for it, and sends its progress if asked."""
        last = -TOLD_SECONDS

        def tell(progress: VerifyProgress) -> None:
            nonlocal last
            if entry.failure is not None:  # set by the scheduler
                raise entry.failure
            if entry.verification.wants_progress and (now := time.monotonic()) >= last + TOLD_SECONDS:
                last = now
                entry.peer.send(VerifyProgressed(entry.submit.id, progress.model_dump_json().encode()))

        return tell

    def _solve(self, batch: Sequence[Entry], *, splits: int, tries: int) -> None:
        """Compute a batch and answer it. If memory runs out, retry in halves; if something else fails, one by one."""
        failure: Exception | None = None
        try:
            with self._watchdog.watched():
                seeds, stages = self.device.launch(batch)
        except Exception as error:
            failure = error
        if failure is None:
            about: Batch | None = account(batch, self._budget, splits)
            number = next(self._numbers)
            for entry, seed in zip(batch, seeds, strict=True):
                entry.seed = seed
                self._done(entry, len(batch), stages, about, number)
                about = None
        elif isinstance(failure, OutOfMemoryError) and (len(batch) > 1 or tries > 1):
            failure.__traceback__ = None  # its frames hold memory that must be freed
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
            for entry in batch:
                self._solve([entry], splits=splits, tries=tries)

    def _fail(self, batch: Sequence[Entry], error: Exception) -> None:
        for entry in batch:
            entry.failure = error
            self.answer(entry)

    def _done(self, entry: Entry, size: int, stages: Stages, about: Batch | None, number: int) -> None:
        """Answer a computed request.

        It ran in launch `number` with `size` requests. `about` describes the launch in the answer of one of them.
        """
        body, spec = entry.attention, entry.spec
        metadata: dict[str, Any] = {"backend": body.backend}
        if body.backend == "torch" and (kernel := self.device.info.kernels.get(spec.dtype)):
            metadata["kernel"] = kernel
        if spec.options.dropout_p:
            metadata["dropout_seed"] = entry.seed
        if (cache_ref := body.cache_ref) is not None:
            metadata["lengths"] = self.device.caches.lengths(cache_ref.owner, cache_ref.caches, cache_ref.layer)
            if entry.reads is not None:
                metadata["reads"] = entry.reads
        if entry.kept is not None:
            metadata["saved"] = entry.kept.serial
        ended, memory, dropped = time.perf_counter(), self.device.memory(), LINES.dropped()
        entry.peer.send(
            Done(entry.submit.id, metadata, entry.began, ended, size, *stages, memory, number, about, dropped)
        )


def _failed(entry: Entry) -> Failed:
    """Return the error message for a failed request. Ends the process if its device is lost."""
    submit, error = entry.submit, entry.failure
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
    error.__traceback__ = None  # the entry may live longer, and must not keep tensors alive
    return reply


def _lost(**about: str) -> NoReturn:
    """End the process. Running requests are lost with the device; another engine gets those that had not started."""
    log.critical("device lost", **about)
    LINES.flush()
    os._exit(1)
