"""Time the same calls in two checkouts alternately; each has its own process, with the same Python and packages.

`script --work` runs in these processes: it reads the names of calls and writes the time of each in microseconds
(`answer`). Only the fastest call of a turn counts, because other programs disturb it least. A row has the median time
of each checkout over the rounds, and the median ratio of the two times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Call = Callable[[], Any]


def answer(calls: Mapping[str, Call], max_calls: int, seconds: float = float("inf")) -> None:
    """For each name of a call on stdin, print the fastest time in µs, of `max_calls` calls or of `seconds` of calls."""
    print(json.dumps(list(calls)), flush=True)
    for name in sys.stdin:
        call, taken = calls[name.strip()], []
        while len(taken) < max_calls and sum(taken) < 1e6 * seconds:
            began = time.perf_counter_ns()
            call()
            taken.append((time.perf_counter_ns() - began) / 1e3)
        print(min(taken), flush=True)


class Side:
    """A process that runs the calls of one checkout."""

    def __init__(self, script: str, tree: Path, **variables: str) -> None:
        paths = os.pathsep.join(str(tree / part) for part in ("kernels", "contract"))
        self._process = subprocess.Popen(
            [sys.executable, script, "--work"], env={**os.environ, **variables, "PYTHONPATH": paths}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
        ).stdout.strip()
        self.names: list[str] = json.loads(self._line())

    def time(self, name: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def in_turns(script: str, beside: Path | None, rounds: int, **variables: str) -> dict[str, Any]:
    """Time each call of `script` here and, if given, in the checkout `beside`. Return its commit and the rows."""
    ours = Side(script, ROOT, **variables)
    sides = [ours] if beside is None else [ours, Side(script, beside, **variables)]
    rows = []
    for name in ours.names:
        for side in sides:
            side.time(name)  # warm-up: compiles kernels and fills caches
        times = [[side.time(name) for side in sides] for _ in range(rounds)]
        row: dict[str, Any] = {"call": name, "us": round(median(each[0] for each in times), 1)}
        if beside is not None:
            row["us_beside"] = round(median(each[1] for each in times), 1)
            row["ratio"] = round(median(each[0] / each[1] for each in times), 3)
        rows.append(row)
        print(row, flush=True)
    for side in sides:
        side.close()
    return {"environment": {"beside": sides[-1].commit} if beside else {}, "rounds": rounds, "rows": rows}
