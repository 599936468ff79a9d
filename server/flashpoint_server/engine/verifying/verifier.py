"""Compute a share of the engine's own answers again in float64, while it is idle. The scheduler runs this as a plug-in.

    answered → copied → waiting → checked in slices → counted      copied → skipped: no room, or too old

A slice begins when nothing runs or waits and no request has come or ended for QUIET seconds, and takes about SLICE.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog

from flashpoint_contract.options import OPTIONS, Options
from flashpoint_kernels.dispatching.machine import cpu_name
from flashpoint_server.engine.execution.device import ComputeDevice
from flashpoint_server.engine.scheduling.engine_request import EngineRequest, Worker
from flashpoint_server.engine.state.memory import tensor_in
from flashpoint_server.engine.verifying import samples
from flashpoint_server.engine.verifying.checking import Outcome, check
from flashpoint_server.engine.verifying.samples import Sample
from flashpoint_server.engine.verifying.slices import Sliced
from flashpoint_server.ipc.messages import AnswerVerified, StartBenchmark, StopJob, Withdraw

log = structlog.stdlib.get_logger("flashpoint.engine")

QUIET = 0.01  # seconds without a request before a slice: a caller that sends one request after another never meets one
SLICE = 0.0015  # seconds after which a slice ends at the next pause, which is at most 3 ms away on one free core
HELD_SECONDS = 60.0  # seconds after which a copy is dropped
ENOUGH = 2  # wrong answers after which the action `drain` withdraws the server

Labels = tuple[str, str, str]


class Verifier:
    """The plug-in, and the function `answered` for the executor. Copies take at most `room` bytes together."""

    name = "a verification"
    suspect = False

    def __init__(self, device: ComputeDevice, rate: float, room: int, action: str) -> None:
        self._device = device
        self._rate, self._room, self._action = rate, room, action
        self._draw = random.Random()  # chooses samples; not for secrets
        self._lock = threading.Lock()
        self._answers = self._blocks = 0
        self._next = self._draw.random() / rate  # the number of the answer to copy next
        self._waiting: deque[Sample] = deque()
        self._held = 0  # bytes of all copies
        self._current: tuple[Sample, Sliced[Outcome]] | None = None
        self._quiet_until = 0.0
        self._busy = False  # whether requests waited or ran at the last look
        self._wrong = 0

    # Called by the executor

    def answered(self, request: EngineRequest) -> None:
        """Note that a request was computed, and copy a portion of it by chance. Call this before it is answered."""
        self._quiet_until = time.monotonic() + QUIET
        if not self._chosen():
            return
        labels = request.backend, request.spec.dtype, request.spec.direction
        try:
            sample = self._sample(request, labels)
        except Exception:  # a bug of the verification must not cost an answer
            log.exception("verification failed", request_id=request.submit.request_id)
            sample = None
        if sample is None:
            _count(request.worker, labels, "skipped")
            return
        with self._lock:
            self._waiting.append(sample)

    def _chosen(self) -> bool:
        """Return whether to copy this answer: a random one of each 1 / rate answers."""
        with self._lock:
            self._answers += 1
            if self._answers < self._next:
                return False
            self._blocks += 1
            self._next = (self._blocks + self._draw.random()) / self._rate
            return True

    def _sample(self, request: EngineRequest, labels: Labels) -> Sample | None:
        tracks = whole = None
        if (ref := request.submit.cache_ref) is not None:
            tracks = self._device.tracks(ref)
        else:
            whole = self._device.in_place(request)
        source = samples.source_of(request, whole, tracks)
        outputs = {t.name: tensor_in(request.memory, t) for t in request.outputs}
        if (portion := samples.choose(source, set(outputs), self._draw)) is None:
            return None
        tensors, answers = samples.views(source, portion, outputs)
        nbytes = sum(t.nbytes for t in (*tensors.values(), *answers.values()))
        with self._lock:
            if self._held + nbytes > self._room:
                return None
            self._held += nbytes
        spec = source.spec
        kernel = self._device.info.kernel(spec.dtype, spec.direction) if labels[0] == "cpu" else None
        group = spec.q_heads // spec.kv_heads
        about = {
            "request_id": request.submit.request_id, "shapes": {t.name: list(t.shape) for t in request.inputs},
            "options": _options(spec.options), "seed": request.seed, "kernel": kernel, "processor": cpu_name(),
            "device": self._device.info.title, "sequence": portion.row.index, "kv_head": portion.heads.start // group,
            "queries": [portion.queries.start, portion.queries.stop], "keys": portion.row.kv_len,
        }  # fmt: skip
        copied, answered = ({name: t.clone() for name, t in some.items()} for some in (tensors, answers))
        return Sample(
            request.worker, about, labels, time.monotonic(), nbytes, copied, answered,
            source.options(answers, request.seed), portion.row.index, portion.heads.start,
            samples.rows_in(source, portion),
        )  # fmt: skip

    # Called by the scheduler

    @property
    def active(self) -> bool:
        """Whether there are copies."""
        return bool(self._waiting) or self._current is not None

    @property
    def due(self) -> float:
        """When the scheduler must look again, by `time.monotonic`: for the next slice, or for the oldest copy."""
        if not self._busy:
            return self._quiet_until
        with self._lock:
            oldest = self._waiting[0].taken if self._waiting else math.inf
        return HELD_SECONDS + min(oldest, self._current[0].taken if self._current else math.inf)

    def hear(self, message: StartBenchmark | StopJob) -> Sequence[Withdraw]:
        return ()

    def history(self) -> Sequence[Withdraw]:
        return self._withdrawn()

    def wants(self, now: float, *, waiting: bool, running: bool) -> bool:
        """Return whether a slice should run now. Drop old copies."""
        self._drop_old(now)
        self._busy = waiting or running
        if self._busy:
            self._quiet_until = max(self._quiet_until, now + QUIET)
            return False
        return self.active and now >= self._quiet_until

    def postpone(self, now: float) -> None:
        self._quiet_until = now + QUIET

    def begin(self) -> None:
        if self._current is None:
            with self._lock:
                sample = self._waiting.popleft()
            self._current = sample, Sliced(partial(check, sample))

    def step(self) -> None:
        assert self._current is not None
        self._current[1].step(SLICE)

    def conclude(self) -> Sequence[Withdraw]:
        """Count the sample if it is done. Return the message that withdraws the server, if it is time for it."""
        assert self._current is not None
        sample, work = self._current
        if not work.done:
            return ()
        self._current = None
        self._release(sample)
        if work.error is not None:
            log.error("verification failed", exc_info=work.error, **sample.about)
            _count(sample.worker, sample.labels, "skipped")
            return ()
        assert work.result is not None
        result, worst = work.result
        _count(sample.worker, sample.labels, result)
        if result != "wrong":
            return ()
        self._wrong += 1
        about = dict(zip(("backend", "dtype", "direction"), sample.labels, strict=True)) | sample.about | worst
        log.error("wrong answer", count=self._wrong, **about)
        return self._withdrawn() if self._wrong == ENOUGH else ()

    def _withdrawn(self) -> Sequence[Withdraw]:
        return (Withdraw(self._wrong),) if self._action == "drain" and self._wrong >= ENOUGH else ()

    def _drop_old(self, now: float) -> None:
        with self._lock:
            old = []
            while self._waiting and now - self._waiting[0].taken >= HELD_SECONDS:
                old.append(self._waiting.popleft())
        if self._current is not None and now - self._current[0].taken >= HELD_SECONDS:
            self._current[1].end()
            old.append(self._current[0])
            self._current = None
        for sample in old:
            self._release(sample)
            _count(sample.worker, sample.labels, "skipped")

    def _release(self, sample: Sample) -> None:
        with self._lock:
            self._held -= sample.nbytes


def _count(worker: Worker, labels: Labels, result: str) -> None:
    """Tell one HTTP process to count a result: all processes together export the sum."""
    worker.send(AnswerVerified(*labels, result))


def _options(options: Options) -> dict[str, Any]:
    """Return the options that differ from their defaults, without the seed: that in a plan is not the request's."""
    return {name: getattr(options, name) for name in OPTIONS if name in options.given - {"dropout_seed"}}
