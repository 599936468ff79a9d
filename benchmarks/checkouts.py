"""Time the same calls in two checkouts alternately; each has its own process, with the same Python and packages.

Only the fastest call of a turn counts, because other programs disturb it least. A row has the median time of each
checkout over the rounds, and the median ratio of the two times.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from record import ROOT, commit
from runner import Option, apart, in_turn, medians, ratio

Call = Callable[[], Any]
BESIDE = Option(None, "a checkout of another commit", type=Path)


def timed(make: Callable[[], Mapping[str, Call]], max_calls: int, seconds: float) -> dict[str, Callable[..., Any]]:
    """Return functions: `names` of the calls of `make`, and `fastest`, the µs of the fastest call of one turn.

    A turn has `max_calls` calls, or as many as fill `seconds`.
    """
    calls = make()

    def fastest(name: str) -> float:
        call, taken = calls[name], []
        while len(taken) < max_calls and sum(taken) < 1e6 * seconds:
            began = time.perf_counter_ns()
            call()
            taken.append((time.perf_counter_ns() - began) / 1e3)
        return min(taken)

    return {"names": lambda: list(calls), "fastest": fastest}


def in_turns(
    make: Callable[[], Mapping[str, Call]], beside: Path | None, rounds: int, max_calls: int,
    seconds: float = float("inf"), **variables: str,
) -> dict[str, Any]:  # fmt: skip
    """Time each call of `make` here and, if given, in the checkout `beside`. Return its commit and the rows.

    `make` imports our packages when it runs, so that they come from the checkout.
    """
    trees = {"us": ROOT} | ({"us_beside": beside.resolve()} if beside else {})
    rows = []
    with contextlib.ExitStack() as stack:
        sides = {}
        for side, tree in trees.items():
            # A new process inherits this list.
            with mock.patch.object(sys, "path", [str(tree / "kernels"), str(tree / "contract"), *sys.path]):
                sides[side] = stack.enter_context(apart(timed, make, max_calls, seconds, **variables))
        for name in sides["us"]("names"):
            ways = {side: lambda ask=ask, name=name: ask("fastest", name) for side, ask in sides.items()}
            times = list(in_turn(ways, rounds))
            row = {"call": name, **medians(times, digits=1)}
            rows.append(row | ({"ratio": round(ratio(times, "us", "us_beside"), 3)} if beside else {}))
            print(rows[-1], flush=True)
    return {"environment": {"beside": commit(beside)} if beside else {}, "rounds": rounds, "rows": rows}
