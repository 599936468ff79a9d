"""Compare a service that verifies its answers with one that does not: `python benchmarks/verifying.py`, five minutes.

Each pair starts both services, with `--verify-rate` and without, sends them the same calls in turns, and ends them. A
row has the medians over the pairs of throughput (several connections, one call after another each) and of the 99th
percentile of latency (one connection, with pauses in which the engine is idle, so that it verifies).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from runner import SERVICE, Args, in_turn, option, run, target
from serving import Connection, service
from serving_pairs import Message, messages

CALLS = ("one row", "small call", "small gradient", "1,024 keys")


def throughput(port: int, message: Message, seconds: float, connections: int) -> float:
    """Return the calls per second of several connections."""

    def send(_: int) -> int:
        with contextlib.closing(Connection(port)) as connection:
            count, ends = 0, time.perf_counter() + seconds
            while time.perf_counter() < ends:
                connection.post(*message)
                count += 1
            return count

    with ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(send, range(connections))) / seconds


def slowest(port: int, message: Message, seconds: float, pause: float) -> float:
    """Return the 99th percentile of the seconds of calls, with random pauses of `pause` seconds on average."""
    rng, taken, ends = np.random.default_rng(0), [], time.perf_counter() + seconds
    with contextlib.closing(Connection(port)) as connection:
        while time.perf_counter() < ends:
            taken.append(connection.post(*message).whole)
            time.sleep(rng.exponential(pause))
    return float(np.percentile(taken, 99))


def one_pair(args: Args, rates: list[float]) -> dict[str, dict[str, float]]:
    """Return the values with verification divided by those without, by the name of the call."""
    calls, found = messages(), {}
    with contextlib.ExitStack() as stack:
        ports = {
            rate: stack.enter_context(service(args.device, f"--verify-rate={rate}"))[1] for rate in rates
        }  # the order of the starts changes from pair to pair
        for name in CALLS:
            row = {}
            measured: dict[str, Callable[[int], float]] = {
                "throughput": lambda port, m=calls[name]: throughput(port, m, args.seconds, args.connections),  # type: ignore[misc]
                "p99": lambda port, m=calls[name]: slowest(port, m, args.seconds, args.pause / 1000),  # type: ignore[misc]
            }
            for what, function in measured.items():
                ways = {str(rate): partial(function, port) for rate, port in ports.items()}
                rounds = list(in_turn(ways, args.rounds))
                row[what] = median(each[str(args.rate)] / each["0.0"] for each in rounds)
            found[name] = row
    return found


def measure(args: Args) -> dict[str, Any]:
    pairs = []
    for number in range(args.pairs):
        pairs.append(one_pair(args, [args.rate, 0.0][:: -1 if number % 2 else 1]))
        print(f"pair {number + 1} of {args.pairs}: {pairs[-1]}", flush=True)
    rows = [
        {"call": name, **{what: round(median(pair[name][what] for pair in pairs), 4) for what in ("throughput", "p99")}}
        for name in CALLS
    ]
    return {
        "rate": args.rate, "pairs": args.pairs, "rounds": args.rounds, "rows": rows,
        "targets": [
            target("least throughput with / without", min(row["throughput"] for row in rows), "rate", least=0.99),
            target("largest p99 with / without", max(row["p99"] for row in rows), "time", most=1.01),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    run(
        measure,
        "verifying",
        packages=SERVICE,
        device=option("cpu", "device of the services"),
        rate=option(0.01, "share of the answers that one of the services verifies"),
        pairs=option(5, "pairs of services"),
        rounds=option(3, "rounds of each measurement in a pair"),
        seconds=option(1.0, "of calls in a round"),
        connections=option(4, "connections of the throughput"),
        pause=option(5.0, "mean milliseconds between the calls whose latency is measured"),
    )
