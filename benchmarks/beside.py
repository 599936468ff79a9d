"""Time a benchmark and small requests, alone and at once: `python benchmarks/beside.py`, two minutes on two cores.

One service gets small requests, forward (1,8,128,64) in float32, in an open loop with Poisson arrivals. A benchmark of
a few rows runs through `POST /benchmark`. Each round runs each alone, then both at once. Targets: p99 of the requests
rises by at most the longest slice, and no median of the benchmark moves by 10%.
Writes benchmarks/results/beside-<cpu>.json. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from typing import Any

import numpy as np
from forms import SAFETENSORS, Case, Request
from load import drive
from record import percentile
from runner import Option, run, target
from serving import service

import flashpoint
from flashpoint_contract.schemas.benchmark import BenchmarkRow

CASE = Case(128, gradient=False)
CONNECTIONS = 16
RATE = 40.0  # requests per second: a twentieth of the rate of two cores, so that the requests alone form no queue
# The calls take from a tenth of a slice to more than one slice.
GRID = {
    "shapes": [{"batch": 1, "q_heads": 8, "q_len": length, "head_dim": 64} for length in (256, 1024)],
    "backends": ["naive", "sdpa_flash", "torch", "tiled"],
    "directions": ["forward"],
    "relative_precision": 0.02,
    "max_seconds": 1.5,
}
MOVES = 0.1  # largest relative change of a row's milliseconds


def traffic(port: int, seconds: float, seed: int) -> list[float]:
    """Return the latency of each request in seconds, from its arrival."""
    request = Request.post(CASE.path, SAFETENSORS.write(CASE.tensors))
    arrivals = np.random.default_rng(seed).exponential(1 / RATE, int(RATE * seconds)).cumsum()
    return [timed.latency for timed in drive(port, [request] * len(arrivals), CONNECTIONS, arrivals.tolist())]


def rows(port: int) -> list[BenchmarkRow]:
    with flashpoint.Client(f"http://127.0.0.1:{port}", timeout=120) as client:
        job = client.benchmark(**GRID).wait()
    if job.state != "done":
        raise RuntimeError(f"the benchmark is {job.state}: {job.error}")
    return job.rows


def beside(port: int, seed: int) -> tuple[list[float], list[BenchmarkRow]]:
    """Run both at once, the traffic until the benchmark ends; return the latencies and the rows."""
    measured: list[BenchmarkRow] = []
    thread = threading.Thread(target=lambda: measured.extend(rows(port)))
    thread.start()
    latencies = []
    while thread.is_alive():
        latencies += traffic(port, 2.0, seed)
        seed += 1000
    if not measured:
        raise RuntimeError("the benchmark failed")
    return latencies, measured


def measure(args: argparse.Namespace) -> dict[str, Any]:
    latencies_alone: list[float] = []
    latencies_beside: list[float] = []
    rows_alone: list[list[BenchmarkRow]] = []
    rows_beside: list[list[BenchmarkRow]] = []
    with service() as (_, port, _):
        traffic(port, 1.0, 0)
        for number in range(args.rounds):
            latencies_alone += traffic(port, 10.0, number + 1)
            rows_alone.append(rows(port))
            latencies, measured = beside(port, number + 100)
            latencies_beside += latencies
            rows_beside.append(measured)
    slices = [row.longest_slice_ms for measured in rows_beside for row in measured if row.longest_slice_ms is not None]
    table = []
    for index, row in enumerate(rows_alone[0]):
        before = statistics.median(measured[index].ms or 0.0 for measured in rows_alone)
        after = statistics.median(measured[index].ms or 0.0 for measured in rows_beside)
        table.append({"backend": row.backend, "q_len": row.q_len, "alone_ms": before, "beside_ms": after})
    moved = max(abs(row["beside_ms"] / row["alone_ms"] - 1) for row in table)
    rise = (percentile(latencies_beside, 99) - percentile(latencies_alone, 99)) * 1e3
    return {
        "requests_a_second": RATE,
        "requests": {"alone": len(latencies_alone), "beside": len(latencies_beside)},
        "latency_ms": {
            name: {f"p{part}": round(percentile(seen, part) * 1e3, 2) for part in (50, 99)}
            for name, seen in (("alone", latencies_alone), ("beside", latencies_beside))
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
