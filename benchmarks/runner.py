"""Run a benchmark: options, environment, load check, alternating calls, targets, and the recorded result.

A benchmark is a function that takes its options and returns its measurements. `run` does the rest:

    if __name__ == "__main__":
        run(measure, "rpc", rounds=option(10, "rounds of all sizes"))

Each benchmark has `--out`, and `--help` with its module's docstring. On a shared machine, only the ratio of times
measured alternately has a meaning; `pair` and `in_turn` alternate calls. `apart` runs functions in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from pprint import pprint
from statistics import mean, median
from typing import Any, NoReturn
from unittest import mock

from record import ROOT, environment, write

RESULTS = ROOT / "benchmarks" / "results"
# The allocator keeps large buffers and does not return them to the kernel at each free; 32 MiB is glibc's maximum.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
SERVICE = ("torch", "uvicorn", "uvloop", "httptools", "fastapi")  # packages of the service whose versions are recorded
Args = argparse.Namespace
Ask = Callable[..., Any]
BUSY = 0.5  # load average per core above which other programs disturb the times


def option(default: Any, help: str | None = None, **more: Any) -> dict[str, Any]:
    """Return an option of a benchmark as keywords of argparse. If `default` is a number, it sets the type."""
    kind = {"type": type(default)} if isinstance(default, int | float) else {}
    return {"default": default, "help": help, **kind, **more}


def run(
    measure: Callable[[argparse.Namespace], Mapping[str, Any] | None],
    what: str,
    *,
    packages: Collection[str] = SERVICE,
    malloc: bool = True,
    **options: dict[str, Any],
) -> NoReturn:
    """Measure, print the measurements and targets, write OUT/WHAT-MACHINE.json, and exit: with 1 if a target is missed.

    `measure` returns None if nothing could be measured. It prints its `rows` itself, each as soon as it is measured.
    With `malloc`, the measured processes have the settings `MALLOC`.
    """
    doc = inspect.getmodule(measure).__doc__  # type: ignore[union-attr]
    ends = f"Writes OUT/{what}-MACHINE.json. The exit code is 1 if a target is missed or nothing could be measured."
    parser = argparse.ArgumentParser(description=doc, epilog=ends, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, keywords in options.items():
        parser.add_argument(f"--{name}", **keywords)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    args = parser.parse_args()
    check_load()
    machine = environment(*packages, device=getattr(args, "device", "cpu")) | ({"malloc": MALLOC} if malloc else {})
    if (measurements := measure(args)) is None:
        sys.exit(1)
    result = {**measurements, "environment": machine | measurements.get("environment", {})}
    targets = result.get("targets", [])
    shown = {name: value for name, value in measurements.items() if name not in ("environment", "rows", "targets")}
    pprint(shown, width=120, sort_dicts=False)
    for row in targets:
        bound = f"at least {row['at_least']}" if "at_least" in row else f"at most {row['at_most']}"
        verdict = "met" if row["met"] else "MISSED"
        print(f"{row['what']:<75} {row['value']:>8} {row['unit']:<12} {bound:<16} {verdict}")
    write(args.out, what, {"environment": result.pop("environment"), **result})
    sys.exit(not all(row["met"] for row in targets))


def run_named(**benchmarks: Callable[[str], NoReturn]) -> NoReturn:
    """Run the benchmark that the first command-line argument names, by default the first of `benchmarks`.

    Each benchmark is a partial call of `run` without the argument `what`, which becomes the benchmark's name.
    """
    named = {name.replace("_", "-"): benchmark for name, benchmark in benchmarks.items()}
    name = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in named else next(iter(named))
    named[name](name)


def check_load() -> None:
    """If other programs load the machine, warn on stderr that they disturb the times."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        print(f"the load average is {load:.1f} on {cores} cores: other programs disturb the times", file=sys.stderr)


def target(what: str, value: float, unit: str, *, least: float = 0.0, most: float = math.inf) -> dict[str, Any]:
    """Return a measured figure together with its target."""
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


def rate_of(call: Callable[[Any], Any], arguments: Sequence[Any], threads: int, **pool: Any) -> float:
    """Return the calls per second of `call` with each of `arguments`, made by a pool of threads in this order."""
    with ThreadPoolExecutor(threads, **pool) as executor:
        began = time.perf_counter()
        list(executor.map(call, arguments))
        return len(arguments) / (time.perf_counter() - began)


def in_turn(
    ways: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 1, ends: str = "", log: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the results of the functions `ways` in each round, in rotating order; the first `warm` rounds do not count.

    The function named `ends` runs at the start and the end of each round; its value is the pair of results, which
    `undisturbed` reads. With `log`, print each round, with `log` as its title.
    """
    names = [name for name in ways if name != ends]
    for number in range(-warm, rounds):
        turn = number % len(names)
        first = ways[ends]() if ends else None
        results = {name: ways[name]() for name in names[turn:] + names[:turn]}
        if ends:
            results[ends] = first, ways[ends]()
        if number >= 0:
            ordered = {name: results[name] for name in ways}
            if log:
                print(f"{log}, round {number + 1} of {rounds}: {ordered}", flush=True)
            yield ordered


def undisturbed(rounds: Sequence[dict[str, Any]], ends: str, deviation: float) -> list[dict[str, Any]]:
    """Return the rounds in which both values of `ends` differ by at most `deviation` from their overall median.

    In the other rounds, another program used the machine. The mean replaces the pair of values.
    """
    middle = median(value for each in rounds for value in each[ends])
    clean = [each for each in rounds if all(abs(value / middle - 1) <= deviation for value in each[ends])]
    return [{**each, ends: mean(each[ends])} for each in clean]


def medians(rows: Sequence[Mapping[str, float]], digits: int = 3) -> dict[str, float]:
    """Return the median of each field over the rows."""
    return {name: round(median(row[name] for row in rows), digits) for name in rows[0]}


def ratio(rounds: Iterable[Mapping[str, float]], name: str, other: str) -> float:
    """Return the median over the rounds of the first function's value divided by the second's."""
    return median(each[name] / each[other] for each in rounds)


def pair(ours: Callable[[], Any], other: Callable[[], Any], rounds: int, least: float = 0.0) -> dict[str, float]:
    """Return the milliseconds of two calls that alternate, and the median over rounds of the other's time / ours."""
    ways = {"ms": partial(seconds, ours, least), "other_ms": partial(seconds, other, least)}
    times = list(in_turn(ways, rounds))
    milliseconds = {name: round(median(each[name] for each in times) * 1e3, 3) for name in ways}
    return {**milliseconds, "times": round(ratio(times, "other_ms", "ms"), 3)}


@contextlib.contextmanager
def apart(make: Callable[..., Mapping[str, Callable[..., Any]]], *given: Any, **variables: str) -> Iterator[Ask]:
    """Start a process, and run in it `make`, which returns functions by name. Yield a function that calls one of them.

    `ask(name, *arguments)` returns the result of the function `name`. If the result is a generator, the process prints
    each item as it comes, and `ask` returns a list. The process has the environment variables MALLOC and `variables`.
    """
    pool = ProcessPoolExecutor(1, get_context("spawn"), _make, (make, given))
    with mock.patch.dict(os.environ, MALLOC | variables):
        pool.submit(int).result()  # starts the process, which inherits these variables
    with pool:
        yield lambda name, *arguments: pool.submit(_call, name, *arguments).result()


_made: dict[str, Callable[..., Any]] = {}  # the functions of a process that `apart` has started


def _make(make: Callable[..., Mapping[str, Callable[..., Any]]], given: Sequence[Any]) -> None:
    _made.update(make(*given))


def _call(name: str, *arguments: Any) -> Any:
    result = _made[name](*arguments)
    return [*map(_printed, result)] if isinstance(result, Iterator) else result


def _printed(row: Any) -> Any:
    print(json.dumps(row), flush=True)
    return row
