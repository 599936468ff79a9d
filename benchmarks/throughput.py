"""Compare the service with its peers in one run, with the same operator, malloc settings and load.

`python benchmarks/throughput.py --peers all` (in `.venv`, with the `dev` extra). Eight connections in a closed loop,
forward and gradient at (1,8,128,64) and (1,8,1024,64), float32. peers/servers.py defines the peers, and load.py sends
the requests. Each round times every server for most of a second, in rotating order. The operator in a process is timed
at both ends of a round. If its time deviates from the median, another program used the machine, and the round is
discarded. The result has medians of the other rounds, and of ratios within a round.

Then the benchmark sends 200 requests as if from many callers: (1, 8, length, 64) in float32, lengths from 16 to 2048,
about half of them gradients. There are three passes: each request alone, one after another; all in a closed loop, which
gives the saturated rate; and an open loop with Poisson arrivals at 70% of that rate, where the latency of a request
counts from its arrival. The slowdown of a request is its latency divided by its time alone.

Takes twelve minutes, and twice that if it first makes environments. A case of which no round is left counts as a missed
target.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from forms import LONGEST, SAFETENSORS, Case, Form, Request, post, truth
from load import drive, rate
from peers.servers import INSTALLABLE, PEERS, ask, install, installed_version, started
from record import percentile
from runner import Args, apart, in_turn, medians, option, ratio, run, target, undisturbed
from serving import engine_variables, service

CONNECTIONS = 8
CASES = tuple(Case(length, gradient) for length in (128, 1024) for gradient in (False, True))
OURS = "flashpoint"
STEADY = "op, all cores"  # this is timed at both ends of a round
IN_PROCESS = {
    "op, one core": "run_one",
    STEADY: "run_all",
    "op, all cores, calls side by side": "run_side_by_side",
    "torch's op, one core": "sdpa_one",
    "torch's op, all cores": "sdpa_all",
}
ALL_CORES = tuple(name for name in IN_PROCESS if "all cores" in name)
PLAIN = ("FastAPI, inline", "FastAPI, inline, a thread a core", "FastAPI, thread pool")
# The targets by length: the service's rate divided by that of a peer, or of the fastest of several.
WANTED: dict[int, dict[str, float]] = {
    128: {
        "bare ASGI": 1.1, "NVIDIA Triton server": 1.8, "BentoML": 1.8, "LitServe": 4.0, "Ray Serve": 5.0,
        "MLServer": 30.0, "FastAPI, JSON lists": 80.0,
    },
    1024: {"the op on all cores": 0.8, "the best plain FastAPI": 1.1},
}  # fmt: skip
SEVERAL = {"the op on all cores": ALL_CORES, "the best plain FastAPI": PLAIN}
MIXED = 200  # number of requests of many lengths
SHORTEST = 16
LOAD = 0.7  # rate of the open loop as a part of the saturated rate
LENGTHS: dict[str, Callable[[np.random.Generator], Any]] = {
    "log-uniform": lambda rng: np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST + 1), MIXED)),
    "uniform": lambda rng: rng.uniform(SHORTEST, LONGEST + 1, MIXED),
}
TAIL = 5.0  # largest allowed p99 / p50 of mixed requests
# Limit in seconds. A server whose single call takes longer is left out: eight connections would take many seconds.
SLOWEST = 1.0
# Largest allowed error against float64, divided by the largest value. float32 has errors far below it.
BOUND = 1e-3
NO_ROUND = "not measured: another program used the machine in every round"

Calls = Callable[[Case, int], float]


def over_http(port: int, path: Callable[[Case], str], form: Form) -> Calls:
    """Return a function that calls a server. Raises RuntimeError if its answers to the shorter cases are wrong."""
    for case in CASES[:2]:
        status, headers, body = ask(port, path(case), form, case)
        if status != 200:
            raise RuntimeError(f"{path(case)}: {status} {body[:2000].decode(errors='replace')}")
        answers = form.read(headers, body)
        for name, right in truth(case.tensors).items():
            error = np.abs(answers[name] - right).max() / np.abs(right).max()
            if not error <= BOUND:
                raise RuntimeError(f"{path(case)}: {name} of {case.name} is off by {error:.1e} of its largest value")
    requests = {case: post(path(case), form.write(case.tensors)) for case in CASES}

    def calls(case: Case, count: int) -> float:
        return max(timed.ended for timed in drive(port, [requests[case]] * count, CONNECTIONS))

    return calls


def operators() -> dict[str, Callable[..., float]]:
    from peers import in_process

    return in_process.WAYS


@contextlib.contextmanager
def running(wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Calls], dict[str, str]]]:
    """Start the service, its peers and the operator in processes.

    Yield the service's port, a function for each of them that can be timed, and the peers' versions.
    """
    ways, versions = {}, {}
    with contextlib.ExitStack() as stack:
        _, port, _ = stack.enter_context(service())
        ways[OURS] = over_http(port, lambda case: case.path, SAFETENSORS)
        for peer in PEERS:
            if peer.packages and peer.environment not in wanted:
                continue
            ways[peer.name] = over_http(stack.enter_context(started(peer)), peer.path, peer.form)
            if peer.packages:
                versions[peer.name] = installed_version(peer)
        torch = stack.enter_context(apart(operators))
        kernels = stack.enter_context(apart(operators, **engine_variables()))
        for name, way in IN_PROCESS.items():
            ask_way = partial(torch if way.startswith("sdpa") else kernels, way)
            ways[name] = lambda case, count, ask_way=ask_way: ask_way(case.shape, case.gradient, count)
        yield port, ways, versions


def timed_rounds(ways: dict[str, Calls], case: Case, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return the requests per second of each server in each round, without servers that are too slow.

    The calls of a server in a round are a multiple of the connections.
    """
    timed = {}
    for name, calls in ways.items():
        calls(case, 1)  # warm-up: loads imports and starts pools
        if calls(case, 1) <= SLOWEST:
            a_second = 2 * CONNECTIONS / calls(case, 2 * CONNECTIONS)
            count = CONNECTIONS * math.ceil(a_second * seconds / CONNECTIONS)
            timed[name] = lambda calls=calls, count=count: count / calls(case, count)
    return list(in_turn(timed, rounds, warm=0, ends=STEADY, log=case.name))


def mixed_requests(lengths: str, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    chosen = zip(LENGTHS[lengths](rng), rng.integers(0, 2, MIXED), strict=True)
    cases = [Case(int(length), bool(gradient)) for length, gradient in chosen]
    return [post(case.path, SAFETENSORS.write(case.tensors)) for case in cases]


def repetition(port: int, requests: Sequence[Request], connections: int, seed: int) -> dict[str, Any]:
    """Send the requests one after another, in a closed loop, and in an open loop at LOAD times the closed loop's rate.

    Return the seconds of each request alone and in the open loop, and the closed loop's rate ("saturated").
    """
    alone = [timed.latency for timed in drive(port, requests, 1)]
    saturated = rate(drive(port, requests, connections))
    arrivals = np.random.default_rng(seed).exponential(1 / (LOAD * saturated), len(requests)).cumsum()
    # One connection for each request, so that no request waits for a connection.
    latency = [timed.latency for timed in drive(port, requests, len(requests), arrivals.tolist())]
    return {"alone": alone, "saturated": saturated, "latency": latency}


def summary(repetitions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the medians over the repetitions of their percentiles in milliseconds, and of the rate in requests/s.

    Without repetitions, the result is empty.
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


def timed_mixed(port: int, steady: Calls, lengths: str, repetitions: int, deviation: float) -> dict[str, Any]:
    """Time requests of many lengths, and summarise only repetitions that no other program disturbed."""
    requests, seeds = mixed_requests(lengths, seed=0), count(1)
    ways = {
        STEADY: lambda: CONNECTIONS / steady(CASES[-1], CONNECTIONS),
        "mixed": lambda: repetition(port, requests, CONNECTIONS, seed=next(seeds)),
    }
    runs = []
    for each in in_turn(ways, repetitions, warm=0, ends=STEADY):
        runs.append(each)
        print(f"mixed, {lengths}, {len(runs)} of {repetitions}: {summary([each['mixed']])}", flush=True)
    clean = [each["mixed"] for each in undisturbed(runs, STEADY, deviation)]
    return {"repetitions": len(clean), "thrown_away": len(runs) - len(clean), **summary(clean)}


def table_of(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return each server's requests per second, and our rate divided by it in the same round; empty without rounds."""
    table = {}
    for name in rounds[0] if rounds else ():
        rates = [each[name] for each in rounds]
        figures = {"rps": statistics.median(rates), "least": min(rates), "most": max(rates)}
        table[name] = {what: round(figure, 2) for what, figure in figures.items()}
        table[name]["ours_over_it"] = round(ratio(rounds, OURS, name), 3)
    return table


def targets(tables: dict[Case, dict[str, dict[str, float]]], tails: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for case, table in tables.items():
        for what, least in WANTED[case.length].items():
            if present := [name for name in SEVERAL.get(what, (what,)) if name in table]:
                fastest = max(present, key=lambda name: table[name]["rps"])
                label = f"{case.name}: over {what}" + (f" ({fastest})" if what in SEVERAL else "")
                rows.append(target(label, table[fastest]["ours_over_it"], "times", least=least))
    for lengths, figures in tails.items():
        if figures["repetitions"]:
            label = f"mixed, {lengths} lengths: p99 / p50 at {LOAD:.0%} of the saturated rate"
            rows.append(target(label, figures["latency_p99_over_p50"], "times", most=TAIL))
    return rows


def measure(args: Args) -> dict[str, Any]:
    wanted = INSTALLABLE if "all" in args.peers else args.peers
    for peer in PEERS:
        if peer.environment in wanted:
            install(peer)
    os.environ["FLASHPOINT_HEADER_TIMEOUT"] = "600"  # in the open loop, a connection is idle until its request is due
    with running(wanted) as (port, ways, versions):
        measured = {case: timed_rounds(ways, case, args.rounds, args.seconds) for case in CASES}
        tails = {name: timed_mixed(port, ways[STEADY], name, args.repetitions, args.deviation) for name in LENGTHS}
    clean = {case: undisturbed(rounds, STEADY, args.deviation) for case, rounds in measured.items()}
    tables = {case: table_of(rounds) for case, rounds in clean.items()}
    absent = {peer.name: "not installed" for peer in PEERS if peer.name not in ways}
    slow = f"not measured: a call takes over {SLOWEST:g} s"
    unmeasured = {case: dict.fromkeys(ways, slow if rounds else NO_ROUND) for case, rounds in clean.items()}
    cases = {
        case.name: {
            "rounds": len(clean[case]), "thrown_away": len(measured[case]) - len(clean[case]),
            "ways": unmeasured[case] | absent | table,
        }
        for case, table in tables.items()
    }  # fmt: skip
    rows = targets(tables, tails)
    if not (all(clean.values()) and all(figures["repetitions"] for figures in tails.values())):
        rows.append(target("cases that were measured", 0.0, "all", least=1.0))
    environment = {"peers": versions}
    return {"environment": environment, "connections": CONNECTIONS, "cases": cases, "mixed": tails, "targets": rows}


if __name__ == "__main__":
    run(
        measure,
        "throughput",
        peers=option([], "peers to install and time", choices=["all", *INSTALLABLE], nargs="*"),
        rounds=option(6, "rounds of each case"),
        seconds=option(0.6, "seconds of each way in a round"),
        repetitions=option(3, "repetitions of mixed requests"),
        deviation=option(0.15, "largest deviation of the operator from its median in a round that counts"),
    )
