"""Measurements for several claims: time each case once, and run the project's programs as child processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from flashpoint_contract.timing import is_noisy
from flashpoint_kernels.timing import Case, Timing, measure

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"  # only in a clone; an installed package has no examples
Event = dict[str, Any]
Row = dict[str, Any]
_TIMING = Timing(max_seconds=0.5, min_repeats=2, warmup_ms=20)
ROUNDS = 5  # rounds in which two cases are timed alternately
_AGAIN = 2  # maximum number of repetitions of a measurement that `marks` calls unreliable
QUIET = "needs a quiet machine"  # the verdict of a claim whose times other programs have disturbed
UNMEASURED = "not measured"  # the verdict of a claim about memory, if the process reused memory that it already had


@dataclass(frozen=True)
class Found:
    """The result of one claim."""

    verdict: str
    measured: str
    how: str
    figures: dict[str, Any] = field(default_factory=dict)


Running = Generator[Event, None, Found]


class MissingError(Exception):
    """This machine lacks something that a claim needs. The message becomes the verdict, for example "needs a GPU"."""


@dataclass
class Bench:
    """A device, and the cases already timed on it."""

    device: str
    rows: dict[Case, Row] = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)  # why rows of the current claim are unreliable, see `marks`
    memory: bool = False  # the current claim compares bytes
    limit: float = math.inf  # seconds that the current claim may take
    until: float = math.inf  # `time.monotonic` at which they are over

    def begin(self, seconds: float, memory: bool) -> None:
        """Begin a claim that may take `seconds`. `memory`: it compares bytes, and disturbed times do not matter."""
        self.marks.clear()
        self.memory = memory
        self.limit, self.until = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that the claim still has. Raises MissingError if there are none."""
        if (left := self.until - time.monotonic()) > 0:
            return left
        raise MissingError(f"needs more than {self.limit:.0f} s here")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def needs_gpu(self) -> None:
        """Raise MissingError if the device is not a GPU."""
        if not self.on_gpu:
            raise MissingError("needs a GPU")

    def timed(self, cases: Iterable[Case]) -> Generator[Event, None, list[Row]]:
        """Yield events while timing the cases that have no row yet, and return the rows of all cases.

        Naive attention is timed first, because the speed-ups of other cases are relative to it.
        Raises MissingError if the claim's time is over.
        """
        cases = list(cases)
        for case in sorted(cases, key=lambda case: case.backend != "naive"):
            if case in self.rows:
                continue
            yield {"type": "progress", "what": f"{case.direction} · {case.backend} · N {case.q_len}"}
            naive = self.rows.get(replace(case, backend="naive"), {})
            self.left()
            for _ in range(1 + _AGAIN):
                row = _measured(case, self.device, naive.get("ms"))
                if not (marks(row) or marks(row, True)) or time.monotonic() > self.until:
                    break
            self.rows[case] = row
            yield {"type": "row", "row": row}
        rows = [self.rows[case] for case in cases]
        for row in rows:
            self.marks += [
                f"{row['direction']} of {row['backend']}, N {row['q_len']}, {mark}" for mark in marks(row, self.memory)
            ]
        return rows

    def in_turn(self, one: Case, other: Case) -> Generator[Event, None, float]:
        """Return the speed of `other` relative to `one`: the median of the ratios in rounds that time both cases.

        Rounds in which other programs ran are ignored, unless these are the majority.
        """
        every, quiet = list[float](), list[float]()
        for number in range(ROUNDS):
            self.left()
            yield {"type": "progress", "what": f"{one.backend} and {other.backend} in turn, {number + 1} of {ROUNDS}"}
            a, b = (_measured(case, self.device) for case in (one, other))
            every.append(a["ms"] / b["ms"])
            if not (a["busy"] or b["busy"]):
                quiet.append(every[-1])
        if 2 * len(quiet) > ROUNDS:
            return median(quiet)
        self.marks.append(f"{len(every) - len(quiet)} of {ROUNDS} rounds of {one.backend} and {other.backend}, busy")
        return median(every)


def marks(row: Row, memory: bool = False) -> list[str]:
    """Return why the times of a row, or its memory, are unreliable.

    Other programs ran, the times vary much, or the peak memory is impossibly low.
    """
    if memory:
        return ["memory below the minimum"] if row["peak_bytes_low"] else []
    marks = {"busy": row["busy"], "noisy": is_noisy(row["ms"], row["ms_p20"], row["ms_p80"])}
    return [mark for mark, holds in marks.items() if holds]


def _measured(case: Case, device: str, naive_ms: float | None = None) -> Row:
    running = measure(case, device, _TIMING, naive_ms=naive_ms)
    while True:
        try:
            next(running)
        except StopIteration as end:
            row: Row = end.value
            return row


def program(bench: Bench, *arguments: str, interpreted: bool = False) -> str:
    """Run a Python program to its end, and return its stdout.

    Raises RuntimeError with the last line of its output, and MissingError if the claim's time is over.
    """
    env = os.environ | {"PYTHONIOENCODING": "utf-8"} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    env.pop("FLASHPOINT_URL", None)  # a claim is measured on this machine
    flags = ["-P"] if arguments[0] == "-m" else []  # no module of the working folder takes the place of another
    try:
        run = subprocess.run(
            [sys.executable, *flags, *arguments], env=env, capture_output=True, encoding="utf-8", timeout=bench.left()
        )
    except subprocess.TimeoutExpired:
        raise MissingError(f"needs more than {bench.limit:.0f} s here") from None
    if run.returncode:
        said = (run.stderr.strip() or run.stdout.strip() or "nothing said").splitlines()[-1]
        raise RuntimeError(f"{' '.join(arguments[:2])} ended with {run.returncode}: {said}")
    return run.stdout


def commit() -> str | None:
    """Return the commit of this clone; None if it is not a clone."""
    run = subprocess.run(["git", "-C", str(EXAMPLES.parent), "rev-parse", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() if EXAMPLES.exists() and run.returncode == 0 else None


def example(bench: Bench, name: str, *arguments: str, needs: Sequence[str] = ()) -> dict[str, Any]:
    """Run a program of examples/ with --json, and return its result.

    Raises MissingError if the example needs something that this machine does not have.
    """
    from importlib.util import find_spec

    path = EXAMPLES / name
    if not path.exists():
        raise MissingError("needs a clone of the project, for its examples")
    if [package for package in needs if find_spec(package) is None]:
        raise MissingError("needs the models: make examples")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        program(bench, str(path), *arguments, "--json", str(out))
        answer: dict[str, Any] = json.loads(out.read_text())
    return answer


Run = Callable[[Bench], Running]
