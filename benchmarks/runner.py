"""The runner of the benchmarks: options, environment, load check, pairs, targets, and the recorded result.

A benchmark is a function that takes its options and returns its measurements. `run` does the rest:

    if __name__ == "__main__":
        run(measure, "rpc", rounds=Option(10, "rounds of all sizes"))

Each benchmark has `--out`, and `--help` with its module's docstring. On a shared machine only the ratio of alternating
times is meaningful: `pair` and `in_turn`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

from record import ROOT, environment, write

RESULTS = ROOT / "benchmarks" / "results"
# The allocator keeps large buffers and does not return them to the kernel at each free; 32 MiB is glibc's maximum.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
SERVICE = ("torch", "uvicorn", "uvloop", "httptools", "fastapi")  # packages whose versions count for the service
BUSY = 0.5  # load average per core above which other programs disturb the times


class Option(NamedTuple):
    """An option of a benchmark. Its type is `type`, or that of `default`. `many`: it takes several of `choices`."""

    default: Any
    help: str | None = None
    choices: Collection[Any] | None = None
    type: Callable[[str], Any] | None = None
    many: bool = False

    def add(self, parser: argparse.ArgumentParser, name: str) -> None:
        kind = self.type or (type(self.default) if isinstance(self.default, int | float) else str)
        more: dict[str, Any] = {"nargs": "*"} if self.many else {}
        parser.add_argument(f"--{name}", default=self.default, type=kind, help=self.help, choices=self.choices, **more)


def run(
    measure: Callable[[argparse.Namespace], Mapping[str, Any] | None],
    what: str,
    *,
    packages: Collection[str] = SERVICE,
    malloc: bool = True,
    child: Callable[[argparse.Namespace], Iterable[Any]] | None = None,
    **options: Option,
) -> NoReturn:
    """Measure, print the targets, write OUT/WHAT-DEVICE.json, and exit; with 1 if a target is missed.

    `measure` returns None if nothing could be measured. `malloc`: the measured processes have the settings `MALLOC`.
    `child` yields rows in a separate process (`rows_of_child`).
    """
    doc = inspect.getmodule(measure).__doc__  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in options.items():
        option.add(parser, name)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None and child is not None:
        for row in child(args):
            print(json.dumps(row), flush=True)
        sys.exit()
    check_load()
    machine = environment(*packages, device=getattr(args, "device", "cpu")) | ({"malloc": MALLOC} if malloc else {})
    if (measurements := measure(args)) is None:
        sys.exit(1)
    result = {**measurements, "environment": machine | measurements.get("environment", {})}
    targets = result.get("targets", [])
    for row in targets:
        bound = f"at least {row['at_least']}" if "at_least" in row else f"at most {row['at_most']}"
        verdict = "met" if row["met"] else "MISSED"
        print(f"{row['what']:<75} {row['value']:>8} {row['unit']:<12} {bound:<16} {verdict}")
    write(args.out, what, {"environment": result.pop("environment"), **result})
    sys.exit(not all(row["met"] for row in targets))


def check_load() -> None:
    """Warn on stderr if other programs use the machine: do not record such times."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        print(f"the load average is {load:.1f} on {cores} cores: other programs disturb the times", file=sys.stderr)


def target(what: str, value: float, unit: str, *, least: float = 0.0, most: float = math.inf) -> dict[str, Any]:
    """Return a figure with its target."""
    bound = {"at_least": least} if least else {"at_most": most}
    return {"what": what, "value": round(value, 3), "unit": unit, **bound, "met": least <= value <= most}


def seconds(call: Callable[[], Any], least: float = 0.0) -> float:
    """Return the seconds of one call, or the median of as many calls as fill `least` seconds."""
    taken: list[float] = []
    while not taken or sum(taken) < least:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return median(taken)


def pair(ours: Callable[[], Any], other: Callable[[], Any], rounds: int, least: float = 0.0) -> dict[str, float]:
    """Return milliseconds of two calls that alternate, and the median over rounds of the other's time over ours."""
    ours(), other()
    times = [(seconds(ours, least), seconds(other, least)) for _ in range(rounds)]
    mine, theirs = ([pair[n] for pair in times] for n in (0, 1))
    return {
        "ms": round(median(mine) * 1e3, 3),
        "other_ms": round(median(theirs) * 1e3, 3),
        "times": round(median(b / a for a, b in times), 3),
    }


class Measured(dict[str, list[float]]):
    """Measured seconds by name."""

    def add(self, name: str, *seen: float) -> None:
        self.setdefault(name, []).extend(seen)

    def median(self, name: str) -> float:
        return median(self[name])

    def ratio(self, name: str, other: str) -> float:
        """Return the median of the first over the second, round by round."""
        return median(a / b for a, b in zip(self[name], self[other], strict=True))


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int, measured: Measured) -> None:
    """Add the seconds that each way returns, in alternating order. The first round does not count."""
    for counts in range(rounds + 1):
        for name in sorted(ways, reverse=counts % 2 == 1):
            taken = ways[name]()
            if counts:
                measured.add(name, taken)


def rows_of_child(*arguments: str, script: str = "", **variables: str) -> Iterator[Any]:
    """Run this benchmark in a separate process with the settings `MALLOC`, and yield its rows."""
    command = [sys.executable, script or sys.argv[0], *arguments]
    with subprocess.Popen(
        command, env={**os.environ, **MALLOC, **variables}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(process.returncode)
