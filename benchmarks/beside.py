"""Time a benchmark and small requests, alone and together: `python benchmarks/beside.py`, two minutes on two cores.

One service gets small requests, forward (1,8,128,64) in float32, in an open loop with Poisson arrivals. A benchmark of
a few rows runs through `POST /benchmark`. Each round runs the requests alone, the benchmark alone, then both together.
Targets: the p99 latency of the requests rises by at most the longest time slice of a benchmark, and no median of the
benchmark changes by 10% or more. Writes benchmarks/results/beside-<cpu>.json. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from forms import SAFETENSORS, Case, Request
from load import drive
from record import percentile
from runner import Args, option, run, target
from serving import service

import flashpoint
from flashpoint_contract.schemas.benchmark import BenchmarkRow

CASE = Case(128, gradient=False)
CONNECTIONS = 16
RATE = 40.0  # requests per second: 1/20 of what two cores can answer, so that no queue forms without the benchmark
# The calls take between a tenth of a time slice and more than one time slice.
GRID = {
    "shapes": [{"batch": 1, "q_heads": 8, "q_len": length, "head_dim": 64} for length in (256, 1024)],
    "backends": ["naive", "sdpa_flash", "torch", "tiled"],
    "directions": ["forward"],
    "relative_precision": 0.02,
    "max_seconds": 1.5,
}
MOVES = 0.1  # largest allowed relative change of a row's milliseconds


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
    """Run traffic and benchmark together until the benchmark ends; return the latencies and the benchmark's rows."""
    latencies = []
    with ThreadPoolExecutor(1) as pool:
        benchmark = pool.submit(rows, port)
        while not benchmark.done():
            latencies += traffic(port, 2.0, seed)
            seed += 1000
    return latencies, benchmark.result()


def measure(args: Args) -> dict[str, Any]:
    latencies: dict[str, list[float]] = {"alone": [], "beside": []}
    measured: dict[str, list[list[BenchmarkRow]]] = {"alone": [], "beside": []}
    with service() as (_, port, _):
        traffic(port, 1.0, 0)
        for number in range(args.rounds):
            latencies["alone"] += traffic(port, 10.0, number + 1)
            measured["alone"].append(rows(port))
            seen, rows_beside = beside(port, number + 100)
            latencies["beside"] += seen
            measured["beside"].append(rows_beside)
    slices = [row.longest_slice_ms for run in measured["beside"] for row in run if row.longest_slice_ms is not None]
    table = []
    for index, row in enumerate(measured["alone"][0]):
        ms = {f"{when}_ms": statistics.median(run[index].ms or 0.0 for run in runs) for when, runs in measured.items()}
        table.append({"backend": row.backend, "q_len": row.q_len, **ms})
    moved = max(abs(row["beside_ms"] / row["alone_ms"] - 1) for row in table)
    rise = (percentile(latencies["beside"], 99) - percentile(latencies["alone"], 99)) * 1e3
    return {
        "requests_a_second": RATE,
        "requests": {when: len(seen) for when, seen in latencies.items()},
        "latency_ms": {
            when: {f"p{part}": round(percentile(seen, part) * 1e3, 2) for part in (50, 99)}
            for when, seen in latencies.items()
        },
        "longest_slice_ms": round(max(slices), 2),
        "rows": table,
        "targets": [
            target("p99 of small requests beside a benchmark, more than alone", rise, "ms", most=max(slices)),
            target("a median of the benchmark beside traffic, moved by", moved, "of itself", most=MOVES),
        ],
    }


if __name__ == "__main__":
    run(measure, "beside", rounds=option(3))
