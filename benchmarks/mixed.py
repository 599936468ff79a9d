"""Time 200 requests of many lengths, forward and gradient, as if from many callers.

The shapes are (1, 8, length, 64) in float32 with lengths from 16 to 2048. The seed makes about half of the requests
gradients. There are three passes:

- each request alone, one after another;
- all in a closed loop, which gives the saturated rate;
- an open loop with Poisson arrivals at 70% of that rate. The latency of a request counts from its arrival.

The slowdown of a request is its latency divided by its time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from forms import LONGEST, SAFETENSORS, Case, Request
from load import drive, rate
from record import percentile
from runner import medians

COUNT = 200
SHORTEST = 16
LOAD = 0.7  # of the saturated rate
LENGTHS: dict[str, Callable[[np.random.Generator], Any]] = {
    "log-uniform": lambda rng: np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST + 1), COUNT)),
    "uniform": lambda rng: rng.uniform(SHORTEST, LONGEST + 1, COUNT),
}


def requests(lengths: str, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    chosen = zip(LENGTHS[lengths](rng), rng.integers(0, 2, COUNT), strict=True)
    cases = [Case(int(length), bool(gradient)) for length, gradient in chosen]
    return [Request.post(case.path, SAFETENSORS.write(case.tensors)) for case in cases]


def repetition(port: int, requests: Sequence[Request], connections: int, seed: int) -> dict[str, Any]:
    """Run each pass once; return the seconds of each request alone and under load, and the saturated rate."""
    alone = [timed.latency for timed in drive(port, requests, 1)]
    saturated = rate(drive(port, requests, connections))
    arrivals = np.random.default_rng(seed).exponential(1 / (LOAD * saturated), len(requests)).cumsum()
    # One connection for each request, so that no request waits for a connection.
    latency = [timed.latency for timed in drive(port, requests, len(requests), arrivals.tolist())]
    return {"alone": alone, "saturated": saturated, "latency": latency}


def summary(repetitions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return medians over the repetitions of their percentiles, in milliseconds, and of the rate in requests/s.

    The result is empty without repetitions.
    """
    rows = []
    for each in repetitions:
        latency, alone = np.array(each["latency"]), np.median([other["alone"] for other in repetitions], axis=0)
        samples = {"latency_ms": latency * 1e3, "alone_ms": np.array(each["alone"]) * 1e3, "slowdown": latency / alone}
        row = {"saturated_rps": each["saturated"]}
        row |= {f"{name}_p{p}": percentile(values, p) for name, values in samples.items() for p in (50, 99)}
        row |= {f"{name}_p99_over_p50": row[f"{name}_ms_p99"] / row[f"{name}_ms_p50"] for name in ("latency", "alone")}
        rows.append(row)
    return medians(rows) if rows else {}
