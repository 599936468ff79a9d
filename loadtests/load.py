"""Generate load in this process: start callers, keep a rate of calls, and record the outcome of each call."""

from __future__ import annotations

import logging
import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
from cases import WRONG
from locust.env import Environment
from locust.html import get_html_report
from locust.stats import stats_history
from locustfile import KINDS

from benchmarks.record import percentile

PERIOD = 1.0  # seconds between the calls of a caller in an open loop; a longer call counts as a failure
# Seconds before counting: each caller connects, and makes its first call after a random 1 to 2 periods.
SETTLE = 2.5 * PERIOD
WARM = 0.5  # seconds before a closed loop counts calls

logging.getLogger("locust").setLevel(logging.ERROR)  # hides a warning that many callers start at once
logging.getLogger("locust.runners").setLevel(logging.CRITICAL)  # hides an error about callers that stop before a call


@dataclass(frozen=True)
class Call:
    id: str  # the request's id in the server's log
    began: float  # `time.time` seconds
    ms: float
    error: str | None


@dataclass
class Step:
    """One step of a scenario: its load and the outcomes of its calls.

    `offered` is the rate of calls in an open loop, in calls per second; None in a closed loop.
    """

    scenario: str
    name: str
    callers: int
    offered: float | None
    began: float = 0.0  # `time.time` seconds
    seconds: float = 0.0
    busy: float = 0.0  # CPU time of this process over `seconds`; near 1, this process limits the rate, not the server
    calls: list[Call] = field(default_factory=list)  # calls that began in this step; set after the load

    @property
    def rate(self) -> float:
        """Return the right answers per second."""
        return sum(call.error is None for call in self.calls) / self.seconds if self.seconds else 0.0

    @property
    def errors(self) -> Counter[str]:
        return Counter(call.error for call in self.calls if call.error is not None)

    @property
    def error_rate(self) -> float:
        return self.errors.total() / len(self.calls) if self.calls else 1.0  # without calls, the step has failed

    def percentile(self, part: float) -> float:
        """Return a percentile of the latency of right answers in milliseconds; infinite if there is none."""
        times = [call.ms for call in self.calls if call.error is None]
        return percentile(times, part)

    def _finite(self, part: float) -> float | None:
        """Return the percentile in milliseconds, or None without right answers."""
        return round(ms, 1) if math.isfinite(ms := self.percentile(part)) else None

    def row(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "step": self.name,
            "callers": self.callers,
            "offered": self.offered and round(self.offered, 1),
            "answered": round(self.rate, 1),
            **{f"p{part}_ms": self._finite(part) for part in (50, 95, 99)},
            "calls": len(self.calls),
            "errors": self.errors.total(),
            "wrong": sum(count for what, count in self.errors.items() if what.startswith(WRONG)),
            "generator_busy": round(self.busy, 2),
            "why": "; ".join(f"{count}× {what}" for what, count in self.errors.most_common(3)),
        }


class Load:
    """Callers of one kind against `host`, as a context manager.

    Callers do not pause between two steps. `Step.calls` is set at the end of the context.
    """

    def __init__(self, scenario: str, kind: str, host: str) -> None:
        self._scenario, self._kind = scenario, kind
        self._options = Namespace(calls_per_second=0.0)
        self.environment = Environment(
            user_classes=[KINDS[kind]], host=host, parsed_options=self._options, stop_timeout=2 * PERIOD
        )
        self._runner = self.environment.create_local_runner()
        self._calls: list[Call] = []
        self._steps: list[Step] = []
        self.environment.events.request.add_listener(self._record_call)

    def __enter__(self) -> Load:
        self._history = gevent.spawn(stats_history, self._runner)
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.quit()  # waits for the answers to calls in flight
        self._history.kill()
        for step in self._steps:
            step.calls = [call for call in self._calls if 0 <= call.began - step.began < step.seconds]

    def closed(self, callers: int, seconds: float) -> Step:
        """Run a closed loop: each of `callers` calls again as soon as its answer comes."""
        self._options.calls_per_second = 0.0
        return self._run(Step(self._scenario, f"{self._kind}, {callers} callers", callers, None), seconds, WARM)

    def open(self, rate: float, seconds: float, name: str, settle: float = SETTLE) -> Step:
        """Run an open loop of `rate` calls per second; count the calls that begin after `settle` seconds."""
        callers = max(1, round(rate * PERIOD))
        self._options.calls_per_second = 1 / PERIOD
        return self._run(Step(self._scenario, name, callers, callers / PERIOD), seconds, settle)

    def count(self, step: Step, during: Callable[[], None]) -> Step:
        """Call `during`. The calls that begin before it returns will be those of `step`. Return `step`."""
        step.began, began, computed = time.time(), time.perf_counter(), time.process_time()
        during()
        step.seconds = time.perf_counter() - began
        step.busy = (time.process_time() - computed) / step.seconds
        self._steps.append(step)
        return step

    def html(self) -> str:
        """Return locust's report as HTML."""
        return get_html_report(self.environment, show_download_link=False)

    def _run(self, step: Step, seconds: float, settle: float) -> Step:
        # locust also stops surplus callers at `spawn_rate`. With this rate it stops all of them within a second.
        self._runner.start(step.callers, spawn_rate=max(step.callers, self._runner.user_count, 1))
        gevent.sleep(settle)
        return self.count(step, lambda: gevent.sleep(seconds))

    def _record_call(
        self, start_time: float, response_time: float, context: dict[str, str], exception: Any = None, **_: Any
    ) -> None:
        error = None if exception is None else str(exception)
        self._calls.append(Call(context["id"], start_time, response_time, error))
