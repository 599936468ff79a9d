"""The benchmarks that the engines run, as every HTTP process knows them: each hears all that happens to any of them."""

from __future__ import annotations

import asyncio
import datetime
import math
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from flashpoint.benchmark_schema import ENDED, EVENT, BenchmarkEvent, BenchmarkJob, BenchmarkRequest, StateEvent
from flashpoint_kernels.spec import ProblemError
from flashpoint_kernels.timing.account import standard_flops
from flashpoint_server.cases import cases_of
from flashpoint_server.messages import DeviceInfo, JobDropped, JobEvent, JobOpened, StopJob, Time
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.settings import Settings

if TYPE_CHECKING:
    from flashpoint_server.engine import Engine, Engines

OPENING_SECONDS = 10.0  # that an engine may take to say that it has a job: a launch of its own may run first


class Benchmark:
    """One job, where it runs, and its events."""

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
        self.events.append(event)
        self.job = self.job.after(event)
        self._more.set()
        self._more = asyncio.Event()

    async def ended(self, seconds: float) -> None:
        """Until it has ended, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while not self.over:
                    await self._more.wait()
        except TimeoutError:
            return

    async def follow(self, after: int, patience: float) -> AsyncIterator[BenchmarkEvent | None]:
        """The events behind number `after`, to the job's end; None where nothing happens for `patience` seconds."""
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


class Benchmarks:
    """See the module."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[str, Benchmark] = {}
        self._opening: dict[str, asyncio.Future[Benchmark]] = {}

    def get(self, name: str) -> Benchmark:
        """Raises Refusal 404."""
        if name not in self._known:
            raise Refusal("not_found", "there is no such benchmark, or none any more")
        return self._known[name]

    def load_of(self, engine: Engine) -> int:
        return sum(not benchmark.over for benchmark in self._known.values() if benchmark.engine is engine)

    async def open(self, engines: Engines, request: BenchmarkRequest, owner: str, device: DeviceInfo) -> Benchmark:
        """Check a request, and queue it at an engine. Raises Refusal 422, 429 and 503."""
        self._check(request, device)
        unfinished = [benchmark for benchmark in self._known.values() if not benchmark.over]
        limit, own = self._settings.benchmark_jobs, sum(benchmark.owner == owner for benchmark in unfinished)
        if len(unfinished) + len(self._opening) >= limit or own >= math.ceil(limit / 2):
            raise Refusal("queue_full", f"{len(unfinished)} benchmarks wait or run, {own} of them of this caller")
        name, created = uuid.uuid4().hex, datetime.datetime.now(datetime.UTC).isoformat()
        opened = self._opening[name] = asyncio.get_running_loop().create_future()
        try:
            engines.time(Time(name, owner, request.model_dump_json(exclude_defaults=True).encode(), created))
            return await asyncio.wait_for(opened, OPENING_SECONDS)
        except TimeoutError:
            raise Refusal("engine_lost", "the engine did not take this benchmark; it may be sent again") from None
        finally:
            del self._opening[name]

    def stop(self, benchmark: Benchmark) -> None:
        """Its last event says when it has."""
        benchmark.engine.tell(StopJob(benchmark.job.id))

    def hear(self, said: JobOpened | JobEvent | JobDropped, engine: Engine) -> None:
        if isinstance(said, JobOpened):
            benchmark = self._known[said.job] = Benchmark(engine, said)
            if said.job in self._opening:
                self._opening[said.job].set_result(benchmark)
        elif isinstance(said, JobDropped):
            self._known.pop(said.job, None)
        elif said.job in self._known:
            self._known[said.job].add(EVENT.validate_json(said.event))

    def lost(self, engine: Engine) -> None:
        """The engine died: so did what it had not finished."""
        for benchmark in self._known.values():
            if benchmark.engine is engine and not benchmark.over:
                last = benchmark.events[-1].id if benchmark.events else 0
                at = datetime.datetime.now(datetime.UTC)
                benchmark.add(StateEvent(id=last + 1, state="failed", at=at, error="the engine died with it"))

    def _check(self, request: BenchmarkRequest, device: DeviceInfo) -> None:
        """Raises Refusal 422, with the bound that a request is over."""
        settings, what = self._settings, "preset" if request.preset else "shapes"
        most = settings.benchmark_cases
        grid = len(request.shapes) * len(request.dtypes) * len(request.causal) * len(request.directions)
        if grid * max(len(request.backends), 1) > most:  # before they are made
            raise invalid([(what, f"these are over the {most} cases of one benchmark")])
        try:
            cases = cases_of(request, device.name)
        except ProblemError as error:
            raise invalid(error.errors) from None
        if len(cases) > most:
            raise invalid([(what, f"{len(cases)} cases are over the {most} of one benchmark")])
        if (seconds := len(cases) * request.max_seconds) > settings.benchmark_seconds:
            bound = f"{settings.benchmark_seconds:g} seconds of one benchmark"
            raise invalid([("max_seconds", f"{len(cases)} cases of it are {seconds:g} seconds, over the {bound}")])
        longest = max(standard_flops(case) for case in cases) / device.speed
        if longest > settings.benchmark_call_seconds:
            bound = f"over the bound of {settings.benchmark_call_seconds:g}: others wait for it"
            raise invalid([(what, f"one call would hold the device for about {longest:.1f} seconds, {bound}")])
