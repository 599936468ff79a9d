"""`make soak MINUTES=60`: apply mixed load at 70% of the capacity, and check that resources and latency stay constant.

After each window of load the callers leave, and the resources of the processes are counted: resident memory,
descriptors, threads, shared memory. Conditions: every answer is right, or a documented refusal; these counts, and the
latency, are the same in the last third as in the first. Exits with 0 if they hold, else with 1.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import locust  # noqa: F401  # first: it replaces the standard library's sockets by gevent's
import psutil
import report
from load import Load
from scenarios import REFUSED, SOAK_LOAD, Verdict, ended

from benchmarks import figures, record
from server import Server

CALLERS = 8  # callers of the closed loop that finds the capacity
WARM_WINDOWS = 1  # first windows, not judged: the service makes staging slots of all sizes, libraries fill caches
MIB = 1 << 20
# (factor, amount): the median in the last third of the windows may be factor × the median in the first third + amount.
# Shared memory grows to the largest need of concurrent requests, by a segment of 4 MiB and two descriptors at a time.
SLACK = {
    "resident_mib": (1.1, 16.0),
    "private_mib": (1.05, 8.0),
    "shared_mib": (1.25, 8.0),
    "descriptors": (1.25, 4.0),
    "threads": (1.0, 0.0),
}
LATENCY = (1.5, 5.0)  # allowed growth of the median: to 1.5 times the first value, plus 5 ms


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes of load; default: %(default)s")
    parser.add_argument("--window", type=float, default=30.0, help="seconds between two counts; default: %(default)s")
    args = report.parsed(parser)
    windows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"environment": report.environment(), "windows": windows}
    with Server(args.out) as server:
        with Load("soak", "mix", server.url) as load:
            step = load.closed(CALLERS, min(args.window, 10.0))
        result["capacity"] = round(step.rate, 1)
        rate = result["offered"] = round(SOAK_LOAD * step.rate, 1)
        count = max(round(args.minutes * 60 / args.window), 3) + WARM_WINDOWS
        began = time.monotonic()
        for number in range(count):
            with Load("soak", "mix", server.url) as load:
                step = load.open(rate, args.window, f"window {number}")
            windows.append({"minutes": round((time.monotonic() - began) / 60, 2), **step.row(), **held(server)})
            windows[-1]["errors_by_kind"] = dict(Counter(step.errors))
            # Write the file after each window, so that it has the earlier windows if a later one raises.
            (args.out / "soak.json").write_text(record.text(result))
        verdicts = [*judged(windows[WARM_WINDOWS:]), ended(server.stop())]
    return report.finish(args, "soak", result, verdicts, figures.soak)


def held(server: Server) -> dict[str, float]:
    """Return the resources that all server processes use between two windows, without TCP connections."""
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):  # a process has ended meanwhile: read again
            return _held(server.processes())


def _held(processes: Sequence[psutil.Process]) -> dict[str, float]:
    infos = [process.memory_info() for process in processes]
    mapped = {
        region.path + region.addr: region.size
        for region in processes[0].memory_maps(grouped=False)
        if "flashpoint-staging" in region.path
    }
    return {
        "processes": len(processes),
        "resident_mib": round(sum(info.rss for info in infos) / MIB, 1),
        "private_mib": round(sum(info.rss - info.shared for info in infos) / MIB, 1),
        "shared_mib": round(sum(mapped.values()) / MIB, 1),
        "descriptors": sum(p.num_fds() - len(p.net_connections("tcp")) for p in processes),
        "threads": sum(process.num_threads() for process in processes),
    }


def judged(windows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Compare the last third of the windows with the first third."""
    third = max(len(windows) // 3, 1)
    broken = [what for w in windows for what in w["errors_by_kind"] if not what.startswith(REFUSED)]
    refused = sum(w["errors"] for w in windows)
    calls = sum(w["calls"] for w in windows)
    verdicts = [
        Verdict("Is every answer right, or a refusal?", "; ".join(sorted(set(broken))[:3]) or "every one",
                "right answers, 429, 503, 504", not broken),
        Verdict("How many calls were refused or late?", f"{refused} of {calls}", "at most 1%", refused <= calls / 100),
    ]  # fmt: skip

    def compare(name: str, limit: Callable[[float], float]) -> None:
        first, last = (statistics.median(w[name] for w in part) for part in (windows[:third], windows[-third:]))
        bound = limit(first)
        verdicts.append(
            Verdict(f"Flat: {name}", f"{first:g} in the first third, {last:g} in the last", f"at most {bound:.1f}",
                    last <= bound)
        )  # fmt: skip

    for name, (times, more) in SLACK.items():
        compare(name, lambda first, times=times, more=more: first * times + more)
    compare("p50_ms", lambda first: first * LATENCY[0] + LATENCY[1])
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
