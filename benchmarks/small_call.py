"""Say where the time of a small call goes: `python benchmarks/small_call.py`, one minute.

The call is q, k and v of (1, 8, 128, 64) in float32, one at a time over one connection, as in serving.py. The result
has the medians of the whole call and of its stages (Server-Timing), and the processor time of both processes for a
call. A second service runs under cProfile: for each process, the result has the functions with the most processor time
of their own. The profiler adds to each call of a function, so these times show the order, and their sum is more than a
call's.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Mapping
from json import loads
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
from forms import SAFETENSORS
from runner import ROOT, Args, option, run
from serving import SMALL, Connection, family, service, until

PROFILED = Path(__file__).resolve().parent / "profiled"
WARM = 300  # calls before the first that counts
SHOWN = 16  # functions of each process in the result
LEAST = 0.5  # calls of a function for a small call, below which it belongs to other work
_STAGE = re.compile(r"(\w+);dur=([\d.]+)")
# Functions that wait for events or locks, and what never ends while a process works.
WAITING = ("epoll", "acquire", "run_until_complete", "run_forever", "sleep", "'get' of '_queue")


def calling(port: int) -> Callable[[], tuple[float, dict[str, float]]]:
    """Return a function that makes a call, and returns its seconds and those of its stages."""
    message = SAFETENSORS.whole(dict.fromkeys("qkv", np.random.default_rng(0).random(SMALL, np.float32)))
    connection = Connection(port)

    def call() -> tuple[float, dict[str, float]]:
        headers, body = message
        began = perf_counter()
        connection.request("POST", "/attention", body, headers)
        response = connection.getresponse()
        response.read()
        seconds = perf_counter() - began
        stages = _STAGE.findall(response.headers["server-timing"])
        return seconds, {name: float(ms) / 1000 for name, ms in stages}

    return call


def timed(calls: int) -> dict[str, Any]:
    """Return the microseconds of a call, of its stages, and of the processes."""
    with service() as (child, port, _):
        call, processes = calling(port), family(child)
        for _ in range(WARM):
            call()
        before = {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}
        taken = [call() for _ in range(calls)]
        spent = {name: (sum(each.cpu_times()[:2]) - before[name]) / calls for name, each in processes.items()}
    stages = {name: median(each[name] for _, each in taken) for name in taken[0][1]}
    beyond = median(whole - sum(each.values()) for whole, each in taken)
    rows = {"whole call": median(whole for whole, _ in taken), **stages, "beyond the stages": beyond}
    return {
        "median_microseconds": {name: round(seconds * 1e6) for name, seconds in rows.items()},
        "processor_microseconds": {name: round(seconds * 1e6) for name, seconds in spent.items()},
    }


def functions(calls: int) -> dict[str, list[dict[str, Any]]]:
    """Return the functions of each process that take the most time of their own for a call."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(PROFILED), os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, PROFILE_FOLDER=folder, PYTHONPATH=path), service() as (child, port, _):
            call, processes = calling(port), family(child)

            def totals(number: int) -> dict[str, Mapping[str, tuple[int, float]]]:
                files = {name: Path(folder, f"{each.pid}-{number}.json") for name, each in processes.items()}
                for each in processes.values():
                    each.send_signal(signal.SIGUSR2)
                until(lambda: all(file.exists() for file in files.values()), child)
                return {name: loads(file.read_text()) for name, file in files.items()}

            for _ in range(WARM):
                call()
            before = totals(0)
            for _ in range(calls):
                call()
            after = totals(1)
    return {name: _most(before[name], after[name], calls) for name in after}


def _most(
    before: Mapping[str, tuple[int, float]], after: Mapping[str, tuple[int, float]], calls: int
) -> list[dict[str, Any]]:
    rows = []
    for name, (count, seconds) in after.items():
        earlier = before.get(name, (0, 0.0))
        each = {"calls": round((count - earlier[0]) / calls, 2)}
        if each["calls"] >= LEAST and not any(word in name for word in WAITING):
            rows.append({"function": _short(name), **each, "microseconds": (seconds - earlier[1]) / calls * 1e6})
    rows.sort(key=lambda row: row["microseconds"], reverse=True)
    return [{**row, "microseconds": round(row["microseconds"], 1)} for row in rows[:SHOWN]]


def _short(name: str) -> str:
    """Return a function's name with a path from the package on, and without its line."""
    path, _, function = name.rpartition(":")
    path = path.rpartition(":")[0].removeprefix(f"{ROOT}/").split("/site-packages/")[-1]
    path = re.sub(r"^.*/lib/python[\d.]+/", "", path)
    return (
        f"{path.partition('/')[2] if path.startswith(('server/', 'kernels/')) else path}: {function}" if path else name
    )


def measure(args: Args) -> dict[str, Any]:
    return {"calls": args.calls, "shape": SMALL, **timed(args.calls), "functions": functions(args.calls)}


if __name__ == "__main__":
    run(measure, "small-call", calls=option(1000, "calls of each service"))
