"""The benchmarks that the engines run, as every HTTP process knows them: each hears all that happens to any of them."""

from __future__ import annotations

import asyncio
import datetime
import math
import uuid
from collections.abc import AsyncIterator
from typing import NamedTuple

from flashpoint.benchmark_schema import ENDED, EVENT, BenchmarkEvent, BenchmarkJob, BenchmarkRequest, StateEvent
from flashpoint_contract.options import ProblemError
from flashpoint_kernels.timing.case import standard_flops
from flashpoint_server.config.settings import Settings
from flashpoint_server.engine.cases import cases_of
from flashpoint_server.ipc.client import Engine, Engines, Listener, Said
from flashpoint_server.ipc.messages import DeviceInfo, JobDropped, JobOpened, StopJob, Time
from flashpoint_server.refusal import Refusal, invalid

MEMORY_SHARE = 8  # a case's tensors, their gradients and copies must leave the device's memory to others
HEARSAY_SECONDS = 0.25
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
        if self.events and event.id <= self.events[-1].id:
            return  # said again
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


class _Opening(NamedTuple):
    """A job that an engine has been told of, and has not said that it has."""

    owner: str
    done: asyncio.Future[Benchmark]


def no_such_benchmark() -> Refusal:
    return Refusal("not_found", "there is no such benchmark, or none any more")


class Benchmarks(Listener):
    """See the module."""

    def __init__(self, settings: Settings, engines: Engines) -> None:
        self._settings = settings
        self._engines = engines
        engines.listeners.append(self)
        self._known: dict[str, Benchmark] = {}
        self._opening: dict[str, _Opening] = {}
        self._heard = asyncio.Event()

    async def get(self, name: str) -> Benchmark:
        """Raises Refusal 404. One that another HTTP process has just opened may take a moment to be heard of."""
        try:
            async with asyncio.timeout(HEARSAY_SECONDS):
                while name not in self._known:
                    await self._heard.wait()
        except TimeoutError:
            raise no_such_benchmark() from None
        return self._known[name]

    def _load_of(self, engine: Engine) -> int:
        return sum(not benchmark.over for benchmark in self._known.values() if benchmark.engine is engine)

    async def open(self, request: BenchmarkRequest, owner: str, device: DeviceInfo) -> Benchmark:
        """Check a request, and queue it at an engine. Raises Refusal 422, 429 and 503."""
        self._check(request, device)
        self._drop_old()
        unfinished = [benchmark for benchmark in self._known.values() if not benchmark.over]
        owners = [benchmark.owner for benchmark in unfinished] + [one.owner for one in self._opening.values()]
        limit, own = self._settings.benchmark_jobs, owners.count(owner)
        if len(owners) >= limit or own >= math.ceil(limit / 2):
            raise Refusal("queue_full", f"{len(owners)} benchmarks wait or run, {own} of them of this caller")
        name, created = uuid.uuid4().hex, datetime.datetime.now(datetime.UTC).isoformat()
        opening = self._opening[name] = _Opening(owner, asyncio.get_running_loop().create_future())
        engine = self._engines.least(self._load_of)
        try:
            engine.tell(Time(name, owner, request.model_dump_json(exclude_defaults=True).encode(), created))
            return await asyncio.wait_for(opening.done, OPENING_SECONDS)
        except TimeoutError:
            engine.tell(StopJob(name))
            raise Refusal("engine_lost", "the engine did not take this benchmark; it may be sent again") from None
        finally:
            del self._opening[name]

    def stop(self, benchmark: Benchmark) -> None:
        """Its last event says when it has."""
        benchmark.engine.tell(StopJob(benchmark.job.id))

    def heard(self, engine: Engine, said: Said) -> None:
        if isinstance(said, JobOpened):
            benchmark = self._known[said.job] = Benchmark(engine, said)
            if said.job in self._opening and not self._opening[said.job].done.done():
                self._opening[said.job].done.set_result(benchmark)
            self._heard.set()
            self._heard = asyncio.Event()
        elif isinstance(said, JobDropped):
            self._known.pop(said.job, None)
        elif said.job in self._known:
            self._known[said.job].add(EVENT.validate_json(said.event))

    def _drop_old(self) -> None:
        """Those of an engine that died: nobody else says that they are dropped."""
        now = datetime.datetime.now(datetime.UTC)
        for name, benchmark in list(self._known.items()):
            ended = benchmark.job.ended
            if ended is not None and (now - ended).total_seconds() > self._settings.benchmark_keep:
                del self._known[name]

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
        if len(set(request.backends)) < len(request.backends):
            raise invalid([("backends", "names one twice")])
        grid = len(request.shapes) * len(request.dtypes) * len(request.causal) * len(request.directions)
        if grid * max(len(request.backends), 1) > most:  # before they are made
            raise invalid([(what, f"these are over the {most} cases of one benchmark")])
        try:
            cases = cases_of(request, device.name)
        except ProblemError as error:
            raise invalid(error.errors) from None
        if len(cases) > most:
            raise invalid([(what, f"{len(cases)} cases are over the {most} of one benchmark")])
        seconds = len(cases) * (request.max_seconds + request.warmup_ms / 1000)
        if seconds > settings.benchmark_seconds:
            bound = f"{settings.benchmark_seconds:g} seconds of one benchmark"
            raise invalid([("max_seconds", f"{len(cases)} cases of it are {seconds:g} seconds, over the {bound}")])
        largest = max(4 * case.batch * (
            case.q_heads * case.q_len * (case.head_dim + case.value_dim)
            + case.kv_heads * case.kv_len * (case.head_dim + case.value_dim)
        ) for case in cases)  # fmt: skip
        if largest > device.memory // MEMORY_SHARE:
            bound = f"over the {device.memory // MEMORY_SHARE} that are left to benchmarks"
            raise invalid([(what, f"the tensors of a case have {largest} bytes, {bound}")])
        longest = max(standard_flops(case) for case in cases) / device.speed
        if longest > settings.benchmark_call_seconds:
            bound = f"over the bound of {settings.benchmark_call_seconds:g}: others wait for it"
            raise invalid([(what, f"one call would hold the device for about {longest:.1f} seconds, {bound}")])
