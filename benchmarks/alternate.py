"""Time two calls in turn in one process. On a shared machine only the ratio of alternating times is meaningful."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def seconds(call: Callable[[], Any], least: float = 0.0) -> float:
    """One call's, or the median of as many as fill `least` seconds."""
    taken: list[float] = []
    while not taken or sum(taken) < least:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return median(taken)


def pair(ours: Callable[[], Any], other: Callable[[], Any], rounds: int, least: float = 0.0) -> dict[str, float]:
    """Milliseconds of each, and the median over rounds of what the other takes of ours."""
    ours(), other()
    found = [(seconds(ours, least), seconds(other, least)) for _ in range(rounds)]
    mine, theirs = ([pair[n] for pair in found] for n in (0, 1))
    return {
        "ms": round(median(mine) * 1e3, 3),
        "other_ms": round(median(theirs) * 1e3, 3),
        "times": round(median(b / a for a, b in found), 3),
    }
