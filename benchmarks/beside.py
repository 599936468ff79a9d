"""A benchmark beside traffic, and traffic beside a benchmark: `python benchmarks/beside.py`, two minutes on two cores.

One service. Small requests, forward (1,8,128,64) in float32, come in an open loop with Poisson arrivals; a benchmark of
a few rows runs through `POST /benchmark`. In each round each runs alone and then both at once. Wanted: p99 of the
requests rises by no more than the longest slice takes, and no median of the benchmark moves by 10%.
Goes to benchmarks/results/beside-<cpu>.json. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from typing import Any

import numpy as np
from forms import SAFETENSORS, Case
from load import drive
from record import percentile
from runner import Option, run, target
from serving import service

import flashpoint
from flashpoint_contract.schemas.benchmark import BenchmarkRow

CASE = Case(128, gradient=False)
CONNECTIONS = 16
RATE = 40.0  # requests a second: a twentieth of what two cores serve, so that latency is not a queue of its own
# Calls from a tenth of a slice to more than one.
GRID = {
    "shapes": [{"batch": 1, "q_heads": 8, "q_len": length, "head_dim": 64} for length in (256, 1024)],
    "backends": ["naive", "sdpa_flash", "torch", "tiled"],
    "directions": ["forward"],
    "relative_precision": 0.02,
    "max_seconds": 1.5,
}
MOVES = 0.1  # of a row's milliseconds


def traffic(port: int, seconds: float, seed: int) -> list[float]:
    """Latencies in seconds, from each request's arrival."""
    request = SAFETENSORS.request("/attention", CASE)
    arrivals = np.random.default_rng(seed).exponential(1 / RATE, int(RATE * seconds)).cumsum()
    return [one.latency for one in drive(port, [request] * len(arrivals), CONNECTIONS, arrivals.tolist())]


def rows(port: int) -> list[BenchmarkRow]:
    with flashpoint.Client(f"http://127.0.0.1:{port}", timeout=120) as client:
        job = client.benchmark(**GRID).wait()
    if job.state != "done":
        raise RuntimeError(f"the benchmark is {job.state}: {job.error}")
    return job.rows


def beside(port: int, seed: int) -> tuple[list[float], list[BenchmarkRow]]:
    """Both at once, traffic for as long as the benchmark takes."""
    found: list[BenchmarkRow] = []
    thread = threading.Thread(target=lambda: found.extend(rows(port)))
    thread.start()
    latencies = []
    while thread.is_alive():
        latencies += traffic(port, 2.0, seed)
        seed += 1000
    if not found:
        raise RuntimeError("the benchmark failed")
    return latencies, found


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    quiet: list[float] = []
    loud: list[float] = []
    alone: list[list[BenchmarkRow]] = []
    together: list[list[BenchmarkRow]] = []
    with service() as (_, port, _):
        traffic(port, 1.0, 0)
        for number in range(asked.rounds):
            quiet += traffic(port, 10.0, number + 1)
            alone.append(rows(port))
            latencies, found = beside(port, number + 100)
            loud += latencies
            together.append(found)
    slices = [row.longest_slice_ms for found in together for row in found if row.longest_slice_ms is not None]
    table = []
    for index, row in enumerate(alone[0]):
        before = statistics.median(found[index].ms or 0.0 for found in alone)
        after = statistics.median(found[index].ms or 0.0 for found in together)
        table.append({"backend": row.backend, "q_len": row.q_len, "alone_ms": before, "beside_ms": after})
    moved = max(abs(row["beside_ms"] / row["alone_ms"] - 1) for row in table)
    rise = (percentile(loud, 99) - percentile(quiet, 99)) * 1e3
    return {
        "requests_a_second": RATE,
        "requests": {"alone": len(quiet), "beside": len(loud)},
        "latency_ms": {
            name: {f"p{part}": round(percentile(seen, part) * 1e3, 2) for part in (50, 99)}
            for name, seen in (("alone", quiet), ("beside", loud))
        },
        "longest_slice_ms": round(max(slices), 2),
        "rows": table,
        "targets": [
            target("p99 of small requests beside a benchmark, more than alone", rise, "ms", most=max(slices)),
            target("a median of the benchmark beside traffic, moved by", moved, "of itself", most=MOVES),
        ],
    }


if __name__ == "__main__":
    run(measure, "beside", rounds=Option(3))
