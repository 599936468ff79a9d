"""Run benchmarks on an engine that also serves requests: one at a time, alone on the device, in short slices.

    queued → running (a slice, then requests, then a slice …) → done, failed, cancelled → dropped

After a slice, waiting requests run for four times the slice's duration. So while requests wait, benchmarks take at most
a fifth of the device's time, and a request waits for at most one slice. The next job belongs to the owner whose
benchmarks have used the least time.
"""

from __future__ import annotations

import datetime
import math
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch

from flashpoint_contract.schemas.benchmark import ENDED, BenchmarkEvent, BenchmarkRequest, State, StateEvent
from flashpoint_kernels.problems.reproducible import CORES
from flashpoint_server.engine.benchmarks import local
from flashpoint_server.engine.benchmarks.cases import cases_of
from flashpoint_server.ipc.messages import JobDropped, JobEvent, JobNews, JobOpened, StartBenchmark, StopJob

OTHERS_SHARE = 4  # between slices, requests run this many times as long as a slice
MOST_KEPT = 64  # maximum number of ended jobs that are stored for later queries


@dataclass(eq=False)
class _TimedJob:
    start: StartBenchmark
    events: Generator[BenchmarkEvent | None, None, None]
    news: list[JobNews] = field(default_factory=list)
    last: int = 0  # number of the job's last event
    unwanted: bool = False
    ended: float | None = None  # end time in `time.monotonic` seconds; None before the end


class BenchmarkJobs:
    """The benchmark jobs of one device. The scheduler runs them as a `Plugin` (tasks.py).

    An ended job is stored for `keep` seconds, but at most MOST_KEPT jobs: the oldest are dropped first.
    """

    name = "a benchmark"

    def __init__(self, device: str, slice_ms: float, keep: float) -> None:
        self._device = device
        self._slice_ms = slice_ms
        self._keep = keep
        self._jobs: dict[str, _TimedJob] = {}
        self._running: _TimedJob | None = None
        self._in_slice: _TimedJob | None = None
        self._outcome: BenchmarkEvent | Exception | None = None
        self._used: defaultdict[str, float] = defaultdict(float)  # seconds that the slices of each owner have taken
        self._others_until = 0.0
        self.suspect = False
        self.active = False  # whether any job has not ended

    due = math.inf  # a slice is chosen whenever the scheduler looks for a task

    def wants(self, now: float, *, waiting: bool, running: bool) -> bool:
        """Return whether a slice should run now. Call this only if `active`."""
        return not waiting or now >= self._others_until

    def history(self) -> Iterator[JobNews]:
        """Yield all messages about the jobs in memory, for an HTTP process that connects."""
        for job in self._jobs.values():
            yield from job.news

    def hear(self, message: StartBenchmark | StopJob) -> list[JobNews]:
        """Handle a message from an HTTP process. Return the messages to send to all HTTP processes."""
        match message:
            case StartBenchmark():
                return self._open(message)
            case StopJob():
                return self._stop(message.job)

    def _open(self, start: StartBenchmark) -> list[JobNews]:
        """Queue a job, whose request an HTTP process has checked. Return the messages about it."""
        request = BenchmarkRequest.model_validate_json(start.request)
        job = _TimedJob(start, local.slices(request, self._device, self._slice_ms))
        total = len(cases_of(request, self._device))
        self._jobs[start.job] = job
        self.active = True
        job.news.append(JobOpened(start.job, start.owner, start.request, start.created, total))
        return [*job.news, *self._drop_old()]

    def _stop(self, name: str) -> list[JobNews]:
        """Cancel a job; if it runs a slice, the slice ends first. Do nothing if the job has ended."""
        job = self._jobs.get(name)
        if job is None or job.ended is not None:
            return []
        job.unwanted = True
        return [] if job is self._in_slice else self._end(job, "cancelled")

    def postpone(self, now: float) -> None:
        """Postpone the next slice, because the device did not become idle. `now` is in `time.monotonic` seconds."""
        self._others_until = now + OTHERS_SHARE * self._slice_ms / 1000

    def begin(self) -> None:
        """Choose the job for the next slice. Call this only if `wants` has returned True."""
        self._in_slice = self._running = self._running or self._next()
        self._outcome = None

    def step(self) -> None:
        """Run the slice. This takes long, so it is called without the scheduler's lock, unlike the other methods."""
        job = self._in_slice
        assert job is not None
        began, before = time.monotonic(), torch.get_num_threads()
        torch.set_num_threads(CORES)
        try:
            self._outcome = next(job.events)
        except Exception as error:
            self._outcome = error
        finally:
            torch.set_num_threads(before)
            took = time.monotonic() - began
            self._used[job.start.owner] += took
            self._others_until = time.monotonic() + OTHERS_SHARE * took

    def conclude(self) -> list[JobNews]:
        """Return the messages about the slice that `step` has run. Set `suspect` to whether they name a CUDA error."""
        news = self._concluded()
        self.suspect = any(isinstance(one, JobEvent) and b"CUDA" in one.event for one in news)
        return news

    def _concluded(self) -> list[JobNews]:
        job, outcome, self._in_slice = self._in_slice, self._outcome, None
        assert job is not None
        if isinstance(outcome, Exception):
            return self._end(job, "failed", f"{type(outcome).__name__}: {outcome}")
        news: list[JobNews] = [] if outcome is None else [self._say(job, outcome)]
        if isinstance(outcome, StateEvent) and outcome.state in ENDED:
            self._close(job)
        elif job.unwanted:
            news += self._end(job, "cancelled")
        return news

    def _next(self) -> _TimedJob:
        return min(
            (job for job in self._jobs.values() if job.ended is None), key=lambda job: self._used[job.start.owner]
        )

    def _end(self, job: _TimedJob, state: State, error: str | None = None) -> list[JobNews]:
        self._close(job)
        at = datetime.datetime.now(datetime.UTC)
        return [self._say(job, StateEvent(id=job.last + 1, state=state, at=at, error=error))]

    def _close(self, job: _TimedJob) -> None:
        if job is self._running:
            self._running = None
        job.events.close()
        job.ended = time.monotonic()
        self.active = any(job.ended is None for job in self._jobs.values())

    def _say(self, job: _TimedJob, event: BenchmarkEvent) -> JobEvent:
        job.last = event.id
        news = JobEvent(job.start.job, event.model_dump_json().encode())
        job.news.append(news)
        return news

    def _drop_old(self) -> list[JobNews]:
        ended = [job for job in self._jobs.values() if job.ended is not None]
        old = [job for job in ended if time.monotonic() - (job.ended or 0) > self._keep] + ended[:-MOST_KEPT]
        for job in dict.fromkeys(old):
            del self._jobs[job.start.job]
        return [JobDropped(job.start.job) for job in dict.fromkeys(old)]
