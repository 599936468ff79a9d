"""`make overload`: send ten times as many calls as the service can answer, and check losses, refusals and recovery.

A call has a long computation and a small payload (1 head, length 24576, D 1: 288 KiB), so that the service is the
limit, and not the callers on the same machine. Each call has a deadline of a second. Exits with 0 if every condition
holds, 1 otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

import locust  # noqa: F401  # first: it replaces the standard library's sockets by gevent's
import report
from cases import CASES, make
from load import Call, Load, Step
from locustfile import KINDS, Caller
from scenarios import REFUSED, Verdict, ended

from benchmarks import figures
from benchmarks.record import percentile
from server import Server

LENGTH = 3 << 13  # a core computes the answer in 0.2 s; ten refused calls take the callers about 0.01 s of CPU time
LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)  # offered rates as fractions of the capacity
CALLERS = 4  # callers of the closed loop that finds the capacity
LEAST_GOODPUT, MOST_REFUSAL_MS, MOST_RECOVERY = 0.9, 50.0, 5.0  # fraction of the best step's rate; p99 in ms; seconds
LOW = 0.5  # offered rate during recovery, as a fraction of the capacity

CASES["long"] = [make(LENGTH, LENGTH, 1, heads=1, kv_heads=1)]


class Long(Caller):
    """A long computation with a small payload."""

    kinds = ("long",)


KINDS["long"] = Long


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each step; default: %(default)s")
    args = report.parsed(parser)
    env = report.environment()
    with Server(args.out) as server:
        with Load("overload", "long", server.url) as load:
            capacity = load.closed(CALLERS, args.seconds)
        with Load("overload", "long", server.url) as load:
            steps = [load.open(part * capacity.rate, args.seconds, f"{part:.0%}") for part in LOADS]
            after = load.open(LOW * capacity.rate, args.seconds, "afterwards", settle=0.0)
        code = server.stop()
    best = max(step.rate for step in (capacity, *steps))
    rows = [{**step.row(), **refusals(step)} for step in (capacity, *steps, after)]
    result = {"environment": env, "verdicts": [], "steps": rows}
    return report.finish(args, "overload", result, judged(best, steps[-1], after, code), figures.overload)


def refused(step: Step) -> list[Call]:
    """Return the calls that were refused, without those whose deadline passed."""
    return [call for call in step.calls if call.error is not None and call.error.startswith(("429", "503"))]


def refusals(step: Step) -> dict[str, Any]:
    times = [call.ms for call in refused(step)]
    return {"refused": len(times), "refusal_p99_ms": round(percentile(times, 99), 1) if times else None}


def judged(best: float, worst: Step, after: Step, code: int) -> list[Verdict]:
    goodput, refusal_ms = worst.rate / best, refusals(worst)["refusal_p99_ms"]
    ends = [call.began + call.ms / 1000 - after.began for call in after.calls if call.error is not None]
    recovery = max(ends, default=0.0)
    broken = {e for e in worst.errors if not e.startswith(REFUSED)}
    return [
        Verdict("What do callers get?", "; ".join(sorted(broken)) or "nothing else", "right answers, 429, 503, 504",
                not broken),
        Verdict("How much of its best is answered at ten times its capacity?", f"{goodput:.1%}",
                f"at least {LEAST_GOODPUT:.0%}", goodput >= LEAST_GOODPUT),
        Verdict("How soon is a refusal? p99", "no refusal" if refusal_ms is None else f"{refusal_ms:g} ms",
                f"at most {MOST_REFUSAL_MS:g} ms", refusal_ms is not None and refusal_ms <= MOST_REFUSAL_MS),
        Verdict("When is everything answered again?", f"after {recovery:.1f} s", f"at most {MOST_RECOVERY:g} s",
                recovery <= MOST_RECOVERY),
        ended(code),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
