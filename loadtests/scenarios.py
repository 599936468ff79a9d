"""A scenario a question: what is done to find out, what was counted, and whether that is well."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import gevent
from load import PERIOD, Load, Step
from locustfile import KINDS

from server import Server

REFUSED = ("429", "503", "504", "late")  # what callers may get of a server that is asked too much, or that is ending
CALLERS = (1, 2, 4, 8, 16)  # in a closed loop: more than two cores have use for
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)  # parts of the capacity
SOAK_LOAD = 0.7


@dataclass(frozen=True)
class Bounds:
    """The limits that a run must keep. `scale` multiplies the seconds of each step."""

    errors: float  # part of the calls, up to the soak's load
    p99_ms: float  # up to the soak's load
    throughput: float  # calls a second, of the mix
    loads: tuple[float, ...] = LOADS
    scale: float = 1.0


@dataclass(frozen=True)
class Verdict:
    question: str
    found: str
    wanted: str
    met: bool


@dataclass
class Report:
    steps: list[Step] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)  # locust's own reports, by scenario
    capacity: float = 0.0  # calls of the mix a second

    def judge(self, question: str, found: str, wanted: str, met: bool) -> None:
        self.verdicts.append(Verdict(question, found, wanted, met))

    def no_errors(self, question: str, steps: list[Step], most: float) -> None:
        worst = max(step.error_rate for step in steps)
        self.judge(question, f"{worst:.2%} of a step's calls", f"at most {most:.2%}", worst <= most)

    def only_refusals(self, question: str, steps: list[Step]) -> None:
        broken = [error for step in steps for error in step.errors.elements() if not error.startswith(REFUSED)]
        found = "; ".join(sorted(set(broken))[:3]) or "nothing else"
        self.judge(question, found, "right answers, 429, 503, 504", not broken)


def capacity(report: Report, server: Server, bounds: Bounds) -> None:
    """How many calls a second are answered when callers call again at once? By kind, and for the mix by callers."""
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
    """What do callers wait at which load, and from which on is there no keeping up? In an open loop."""
    with Load("saturation", "mix", server.url) as load:
        steps = [load.open(part * report.capacity, 6 * bounds.scale, f"{part:.0%}") for part in bounds.loads]
        report.pages["saturation"] = load.html()
    report.steps += steps
    served = [step for step, part in zip(steps, bounds.loads, strict=True) if part <= SOAK_LOAD]
    report.no_errors(f"Is everything answered up to {SOAK_LOAD:.0%}?", served, bounds.errors)
    slowest = max(step.percentile(99) for step in served)
    most = bounds.p99_ms
    report.judge(f"And soon? p99 up to {SOAK_LOAD:.0%}", f"{slowest:.1f} ms", f"at most {most:g} ms", slowest <= most)
    kept = min(step.rate / (step.offered or 1.0) for step in served)
    report.judge(
        "And as much as is offered?", f"{kept:.1%}", "at least 95%", kept >= 0.95
    )  # a second's calls more or less
    report.only_refusals("What do callers get over the limit?", steps)


def spike(report: Report, server: Server, bounds: Bounds) -> None:
    """Is it well again after a moment of twice as much as it can do?"""
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
    late, most = after.percentile(99), bounds.p99_ms
    report.judge("And soon? p99 after a spike", f"{late:.1f} ms", f"at most {most:g} ms", late <= most)


def soak(report: Report, server: Server, bounds: Bounds) -> None:
    """Does it stay as it is, at 70% of its capacity? Without errors, and without growing."""
    rate, seconds = SOAK_LOAD * report.capacity, 45 * bounds.scale
    with Load("soak", "mix", server.url) as load:
        first = load.open(rate, seconds / 3, "first third")
        early = server.memory()
        rest = load.open(rate, seconds * 2 / 3, "the rest")
        late = server.memory()
        report.pages["soak"] = load.html()
    report.steps += [first, rest]
    report.no_errors("Is everything answered for long?", [first, rest], bounds.errors)
    grown = late / early
    report.judge("Does it grow? Memory of all its processes", f"{grown:.3f} times", "at most 1.1 times", grown <= 1.1)


def drain(report: Report, server: Server, bounds: Bounds) -> None:
    """When it is told to end under load, is anybody left without an answer who had asked before?"""
    told, code = 0.0, None

    def end() -> None:
        nonlocal told, code
        gevent.sleep(PERIOD)
        told = time.time()
        code = server.stop()

    with Load("drain", "mix", server.url) as load:
        before = load.open(0.5 * report.capacity, 2 * bounds.scale, "before")
        ending = load.count(Step("drain", "a second, SIGTERM, the end", before.callers, before.offered), end)
        report.pages["drain"] = load.html()
    report.steps += [before, ending]
    asked = [call for call in ending.calls if call.began < told]
    cut = [call.id for call in asked if call.error is not None and not call.error.startswith(REFUSED)]
    lost = server.read().intersection(cut)
    found = f"{len(asked) - len(cut)} of {len(asked)}; {len(lost)} of the others had been read"
    report.judge("Who asked before SIGTERM, and was answered?", found, "all that were read", bool(asked) and not lost)
    wrong = [e for e in ending.errors if not e.startswith((*REFUSED, "no answer"))]
    report.judge("Who asked later, and got half an answer?", "; ".join(wrong) or "nobody", "nobody", not wrong)
    report.judge("Did it end well?", f"exit code {code}", "0", code == 0)


SCENARIOS = {each.__name__: each for each in (capacity, saturation, spike, soak, drain)}
