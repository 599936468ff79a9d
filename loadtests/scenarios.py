"""The scenarios of `make loadtest`. Each puts load on the server, counts outcomes, and adds verdicts to the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import gevent
from load import PERIOD, Load, Step
from locustfile import KINDS

from server import Server

REFUSED = ("429", "503", "504", "late")  # error codes that an overloaded or ending server may return to callers
CALLERS = (1, 2, 4, 8, 16)  # numbers of callers in closed loops, up to more than two cores can serve at once
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)  # offered rates as fractions of the capacity
SOAK_LOAD = 0.7


@dataclass(frozen=True)
class Bounds:
    """The limits that a run must keep. `scale` multiplies the seconds of each step."""

    errors: float  # largest fraction of calls that may fail, at loads up to SOAK_LOAD
    p99_ms: float  # largest 99th percentile of the latency, at loads up to SOAK_LOAD
    throughput: float  # least capacity: calls of the kind `mix` per second
    loads: tuple[float, ...] = LOADS
    scale: float = 1.0


@dataclass(frozen=True)
class Verdict:
    question: str
    found: str
    wanted: str
    met: bool


def ended(code: int | None) -> Verdict:
    return Verdict("Did it end well?", f"exit code {code}", "0", code == 0)


@dataclass
class Report:
    steps: list[Step] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)  # locust's reports, by scenario
    capacity: float = 0.0  # calls of the kind `mix` that a closed loop answers per second

    def judge(self, question: str, found: str, wanted: str, met: bool) -> None:
        self.verdicts.append(Verdict(question, found, wanted, met))

    def no_errors(self, question: str, steps: list[Step], max_rate: float) -> None:
        worst = max(step.error_rate for step in steps)
        self.judge(question, f"{worst:.2%} of a step's calls", f"at most {max_rate:.2%}", worst <= max_rate)

    def only_refusals(self, question: str, steps: list[Step]) -> None:
        broken = [error for step in steps for error in step.errors.elements() if not error.startswith(REFUSED)]
        errors = "; ".join(sorted(set(broken))[:3]) or "nothing else"
        self.judge(question, errors, "right answers, 429, 503, 504", not broken)


def capacity(report: Report, server: Server, bounds: Bounds) -> None:
    """How many calls per second does a closed loop answer? By kind, and for the mix by callers."""
    for kind in KINDS:
        with Load("capacity", kind, server.url) as load:
            counts = CALLERS if kind == "mix" else CALLERS[-2:-1]
            steps = [load.closed(callers, 3 * bounds.scale) for callers in counts]
        report.steps += steps
        report.no_errors(f"Is every answer right, of {kind}?", steps, 0.0)
    report.pages["capacity"] = load.html()
    report.capacity = max(step.rate for step in steps)
    enough = report.capacity >= bounds.throughput
    report.judge(
        "How much does it answer?", f"{report.capacity:.1f} calls/s", f"at least {bounds.throughput:g} calls/s", enough
    )


def saturation(report: Report, server: Server, bounds: Bounds) -> None:
    """Measure how long callers wait at each load of an open loop, and from which load on the server falls behind."""
    with Load("saturation", "mix", server.url) as load:
        steps = [load.open(part * report.capacity, 6 * bounds.scale, f"{part:.0%}") for part in bounds.loads]
        report.pages["saturation"] = load.html()
    report.steps += steps
    served = [step for step, part in zip(steps, bounds.loads, strict=True) if part <= SOAK_LOAD]
    report.no_errors(f"Is everything answered up to {SOAK_LOAD:.0%}?", served, bounds.errors)
    slowest = max(step.percentile(99) for step in served)
    limit = bounds.p99_ms
    report.judge(f"And soon? p99 up to {SOAK_LOAD:.0%}", f"{slowest:.1f} ms", f"at most {limit:g} ms", slowest <= limit)
    answered = min(step.rate / (step.offered or 1.0) for step in served)
    report.judge(
        "And as much as is offered?", f"{answered:.1%}", "at least 95%", answered >= 0.95
    )  # a tolerance of 5%: the number of calls that begin within a step varies
    report.only_refusals("What do callers get over the limit?", steps)


def spike(report: Report, server: Server, bounds: Bounds) -> None:
    """Does the server recover after a short load of twice its capacity?"""
    low, high = 0.3 * report.capacity, 2 * report.capacity
    with Load("spike", "mix", server.url) as load:
        before = load.open(low, 4 * bounds.scale, "before")
        during = load.open(high, 4 * bounds.scale, "during")
        recovering = load.open(low, 3 * bounds.scale, "recovering")
        after = load.open(low, 4 * bounds.scale, "after")
        report.pages["spike"] = load.html()
    report.steps += [before, during, recovering, after]
    report.only_refusals("What do callers get in a spike?", [during])
    report.no_errors("Is everything answered after it?", [after], bounds.errors)
    p99_ms, limit = after.percentile(99), bounds.p99_ms
    report.judge("And soon? p99 after a spike", f"{p99_ms:.1f} ms", f"at most {limit:g} ms", p99_ms <= limit)


def soak(report: Report, server: Server, bounds: Bounds) -> None:
    """Does the server run at 70% of its capacity without errors and without growth of memory?"""
    rate, seconds = SOAK_LOAD * report.capacity, 45 * bounds.scale
    with Load("soak", "mix", server.url) as load:
        first = load.open(rate, seconds / 3, "first third")
        early = server.memory()
        rest = load.open(rate, seconds * 2 / 3, "the rest")
        late = server.memory()
        report.pages["soak"] = load.html()
    report.steps += [first, rest]
    report.no_errors("Is everything answered for long?", [first, rest], bounds.errors)
    growth = late / early
    report.judge("Does it grow? Memory of all its processes", f"{growth:.3f} times", "at most 1.1 times", growth <= 1.1)


def drain(report: Report, server: Server, bounds: Bounds) -> None:
    """After SIGTERM under load, does every call that began before it get an answer?"""
    signalled, code = 0.0, None

    def end() -> None:
        nonlocal signalled, code
        gevent.sleep(PERIOD)
        signalled = time.time()
        code = server.stop()

    with Load("drain", "mix", server.url) as load:
        before = load.open(0.5 * report.capacity, 2 * bounds.scale, "before")
        ending = load.count(Step("drain", "a second, SIGTERM, the end", before.callers, before.offered), end)
        report.pages["drain"] = load.html()
    report.steps += [before, ending]
    early = [call for call in ending.calls if call.began < signalled]
    unanswered = [call.id for call in early if call.error is not None and not call.error.startswith(REFUSED)]
    lost = server.read().intersection(unanswered)
    outcome = f"{len(early) - len(unanswered)} of {len(early)}; {len(lost)} of the others had been read"
    report.judge("Who asked before SIGTERM, and was answered?", outcome, "all that were read", bool(early) and not lost)
    wrong = [e for e in ending.errors if not e.startswith((*REFUSED, "no answer"))]
    report.judge("Who asked later, and got half an answer?", "; ".join(wrong) or "nobody", "nobody", not wrong)
    report.verdicts.append(ended(code))


SCENARIOS = {each.__name__: each for each in (capacity, saturation, spike, soak, drain)}
