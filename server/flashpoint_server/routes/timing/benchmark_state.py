"""The benchmarks of all engines. Each HTTP process receives every event of every benchmark."""

from __future__ import annotations

import asyncio
import datetime
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from flashpoint_contract.schemas.benchmark import (
    ENDED,
    EVENT,
    BenchmarkEvent,
    BenchmarkJob,
    BenchmarkRequest,
    StateEvent,
)
from flashpoint_contract.wording.sizes import in_bytes, longest
from flashpoint_kernels.timing.case import Case, standard_flops
from flashpoint_server.config.settings import Settings
from flashpoint_server.engine.benchmarks.cases import cases_of
from flashpoint_server.ipc.client import Engine, Engines, Listener
from flashpoint_server.ipc.messages import DeviceInfo, JobDropped, JobEvent, JobNews, JobOpened, StartBenchmark, StopJob
from flashpoint_server.plan import refuse_invalid
from flashpoint_server.refusal import Refusal, invalid

# A case's tensors may use 1/8 of the device's memory; gradients, copies and other requests need the rest.
MEMORY_SHARE = 8
NEWS_SECONDS = 0.25  # maximum wait for the engine's message about a benchmark that another HTTP process has started
OPENING_SECONDS = 10.0  # maximum wait until an engine accepts a benchmark; the engine may be in a launch


class KnownBenchmark:
    """A benchmark that an engine has accepted: its engine, its state (`job`) and its events."""

    def __init__(self, engine: Engine, opened: JobOpened) -> None:
        self.engine = engine
        self.owner = opened.owner
        self.job = BenchmarkJob(
            id=opened.job,
            created=datetime.datetime.fromisoformat(opened.created),
            total=opened.total,
            request=BenchmarkRequest.model_validate_json(opened.request),
        )
        self.events: list[BenchmarkEvent] = []
        self._more = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.job.state in ENDED

    def add(self, event: BenchmarkEvent) -> None:
        if self.events and event.id <= self.events[-1].id:
            return  # this event arrived before
        self.events.append(event)
        self.job = self.job.after(event)
        self._more.set()
        self._more = asyncio.Event()

    async def ended(self, seconds: float) -> None:
        """Wait until the benchmark ends, but at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.over:
                    await self._more.wait()

    async def follow(self, after: int, patience: float) -> AsyncIterator[BenchmarkEvent | None]:
        """Yield the events with ids above `after` until the job ends. Yield None after each `patience` idle seconds."""
        while True:
            for event in [event for event in self.events if event.id > after]:
                after = event.id
                yield event
            if self.events and self.events[-1].id > after:
                continue
            if self.over:
                return
            try:
                async with asyncio.timeout(patience):
                    await self._more.wait()
            except TimeoutError:
                yield None


class _Opening(NamedTuple):
    """A benchmark that was sent to an engine, but is not accepted yet."""

    owner: str
    done: asyncio.Future[KnownBenchmark]


def no_such_benchmark() -> Refusal:
    return Refusal("not_found", "the benchmark does not exist, or is no longer stored")


class Benchmarks(Listener):
    """Starts, finds and stops benchmarks, and receives their events."""

    def __init__(self, settings: Settings, engines: Engines) -> None:
        self._settings = settings
        self._engines = engines
        engines.listeners.append(self)
        self._known: dict[str, KnownBenchmark] = {}
        self._opening: dict[str, _Opening] = {}
        self._heard = asyncio.Event()

    async def get(self, name: str) -> KnownBenchmark:
        """Return the benchmark with the id `name`. Raises Refusal 404.

        Wait up to NEWS_SECONDS for an unknown id, because another HTTP process may just have started the benchmark.
        """
        try:
            async with asyncio.timeout(NEWS_SECONDS):
                while name not in self._known:
                    await self._heard.wait()
        except TimeoutError:
            raise no_such_benchmark() from None
        return self._known[name]

    def _load_of(self, engine: Engine) -> int:
        return sum(not benchmark.over for benchmark in self._known.values() if benchmark.engine is engine)

    async def open(self, request: BenchmarkRequest, owner: str, device: DeviceInfo) -> KnownBenchmark:
        """Check a request, and queue it on an engine. Raises Refusal 422, 429 and 503."""
        self._check(request, device)
        self._drop_old()
        unfinished = [benchmark for benchmark in self._known.values() if not benchmark.over]
        owners = [benchmark.owner for benchmark in unfinished] + [one.owner for one in self._opening.values()]
        limit, owner_count = self._settings.benchmark_jobs, owners.count(owner)
        if len(owners) >= limit or owner_count >= math.ceil(limit / 2):
            raise Refusal(
                "queue_full",
                f"{len(owners)} benchmarks are queued or running, {owner_count} of them yours; wait until one ends",
            )
        name, created = uuid.uuid4().hex, datetime.datetime.now(datetime.UTC).isoformat()
        opening = self._opening[name] = _Opening(owner, asyncio.get_running_loop().create_future())
        engine = self._engines.least_loaded(self._load_of)
        try:
            engine.tell(StartBenchmark(name, owner, request.model_dump_json(exclude_defaults=True).encode(), created))
            return await asyncio.wait_for(opening.done, OPENING_SECONDS)
        except TimeoutError:
            engine.tell(StopJob(name))
            raise Refusal("engine_lost", "the engine did not accept this benchmark; retry") from None
        finally:
            del self._opening[name]

    def stop(self, benchmark: KnownBenchmark) -> None:
        """Ask the engine to stop a benchmark; an event will confirm it."""
        benchmark.engine.tell(StopJob(benchmark.job.id))

    def heard(self, engine: Engine, news: JobNews) -> None:
        match news:
            case JobOpened():
                benchmark = self._known[news.job] = KnownBenchmark(engine, news)
                if news.job in self._opening and not self._opening[news.job].done.done():
                    self._opening[news.job].done.set_result(benchmark)
                self._heard.set()
                self._heard = asyncio.Event()
            case JobDropped():
                self._known.pop(news.job, None)
            case JobEvent() if news.job in self._known:
                self._known[news.job].add(EVENT.validate_json(news.event))

    def _drop_old(self) -> None:
        """Remove benchmarks that ended over `benchmark_keep` seconds ago.

        A running engine reports that it drops a benchmark (JobDropped), but one that has died cannot.
        """
        now = datetime.datetime.now(datetime.UTC)
        for name, benchmark in list(self._known.items()):
            ended = benchmark.job.ended
            if ended is not None and (now - ended).total_seconds() > self._settings.benchmark_keep:
                del self._known[name]

    def lost(self, engine: Engine) -> None:
        """Mark the unfinished benchmarks of an engine that has died as failed."""
        for benchmark in self._known.values():
            if benchmark.engine is engine and not benchmark.over:
                last = benchmark.events[-1].id if benchmark.events else 0
                at = datetime.datetime.now(datetime.UTC)
                benchmark.add(StateEvent(id=last + 1, state="failed", at=at, error="the engine died"))

    def _check(self, request: BenchmarkRequest, device: DeviceInfo) -> None:
        """Raise Refusal 422 if the request exceeds a limit or names a backend twice."""
        settings, what = self._settings, "preset" if request.preset else "shapes"
        case_limit = settings.benchmark_cases
        if len(set(request.backends)) < len(request.backends):
            raise invalid([("backends", "contains a backend twice")])
        grid = len(request.shapes) * len(request.dtypes) * len(request.causal) * len(request.directions)
        if grid * max(len(request.backends), 1) > case_limit:  # checked first: the list of cases could be huge
            raise invalid([(what, f"these exceed the limit of {case_limit} cases for one benchmark")])
        with refuse_invalid():
            cases = cases_of(request, device.name)
        if len(cases) > case_limit:
            raise invalid([(what, f"{len(cases)} cases exceed the limit of {case_limit} for one benchmark")])
        seconds = len(cases) * (request.max_seconds + request.warmup_ms / 1000)
        if seconds > settings.benchmark_seconds:
            bound = f"limit of {settings.benchmark_seconds:g} for one benchmark"
            raise invalid([("max_seconds", f"{len(cases)} cases need {seconds:g} seconds, over the {bound}")])
        if reason := self._too_large(cases, device):

            def fits(length: int) -> bool:
                shorter = [
                    replace(case, q_len=min(case.q_len, length), kv_len=min(case.kv_len, length)) for case in cases
                ]
                return self._too_large(shorter, device) is None

            lengths = longest(fits, max(max(case.q_len, case.kv_len) for case in cases))
            raise invalid([(what, f"{reason}; {lengths}")])

    def _too_large(self, cases: Sequence[Case], device: DeviceInfo) -> str | None:
        """Return why the largest of the cases exceeds a limit; None if none does."""
        largest = max(4 * case.batch * (
            case.q_heads * case.q_len * (case.head_dim + case.value_dim)
            + case.kv_heads * case.kv_len * (case.head_dim + case.value_dim)
        ) for case in cases)  # fmt: skip
        if largest > (memory := device.memory // MEMORY_SHARE):
            bound = f"over the limit of {in_bytes(memory)} for benchmarks"
            return f"the tensors of a case have {in_bytes(largest)}, {bound}"
        seconds = max(standard_flops(case) for case in cases) / device.speed
        if seconds > (most := self._settings.benchmark_call_seconds):
            bound = f"over the limit of {most:g}, because other requests wait for it"
            return f"one call would use the device for about {seconds:.1f} seconds, {bound}"
        return None
