"""Time the service beside its peers in one run, with the same operator, malloc settings and load.

`python benchmarks/throughput.py --peers all` (in `.venv`, with the `dev` extra). Eight connections in a closed loop,
forward and gradient at (1,8,128,64) and (1,8,1024,64), float32. peers/servers.py has the peers, load.py the load,
mixed.py the requests of many lengths. Each round times every way for most of a second, in rotating order. The operator
in a process is timed at both ends of a round. If it deviates from its median, another program used the machine, and the
round is discarded. Medians of the other rounds, and of ratios within a round, go to
benchmarks/results/throughput-<cpu>.json. Takes twelve minutes, and twice that if it first makes environments. Exits
with 1 if a target is missed, or if no round of a case is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mixed
import numpy as np
from forms import SAFETENSORS, Case, Form
from load import drive
from peers.servers import HERE, INSTALLABLE, PEERS, ask, install, installed_version, started
from runner import Option, run, target
from serving import environment_of_the_engine, process, service

CONNECTIONS = 8
CASES = tuple(Case(length, gradient) for length in (128, 1024) for gradient in (False, True))
OURS = "flashpoint"
STEADY = "op, all cores"  # timed at both ends of a round
IN_PROCESS = {
    "op, one core": "run_one",
    STEADY: "run_all",
    "op, all cores, calls side by side": "run_side_by_side",
    "torch's op, one core": "sdpa_one",
    "torch's op, all cores": "sdpa_all",
}
ALL_CORES = tuple(name for name in IN_PROCESS if "all cores" in name)
PLAIN = ("FastAPI, inline", "FastAPI, inline, a thread a core", "FastAPI, thread pool")
# The targets, by length: the service's rate over that of the fastest of these peers.
WANTED: dict[int, tuple[tuple[float, str, tuple[str, ...]], ...]] = {
    128: (
        (1.1, "bare ASGI", ("bare ASGI",)),
        (1.8, "NVIDIA Triton server", ("NVIDIA Triton server",)),
        (1.8, "BentoML", ("BentoML",)),
        (4.0, "LitServe", ("LitServe",)),
        (5.0, "Ray Serve", ("Ray Serve",)),
        (30.0, "MLServer", ("MLServer",)),
        (80.0, "FastAPI, JSON lists", ("FastAPI, JSON lists",)),
    ),
    1024: ((0.8, "the op on all cores", ALL_CORES), (1.1, "the best plain FastAPI", PLAIN)),
}
TAIL = 5.0  # p99 over p50 of mixed requests, at most
# Seconds. Rounds leave out a way whose single call takes longer: eight connections would hold each for many seconds.
SLOWEST = 1.0
# Limit of an answer's error against float64, over its largest value; float32 reaches a tenth of it.
BOUND = 1e-3
NO_ROUND = "not measured: another program used the machine in every round"

Calls = Callable[[Case, int], float]


class Rounds:
    """The rates of a case in requests per second: of each way in each round, and of `STEADY` at a round's ends."""

    def __init__(self) -> None:
        self._rates: list[dict[str, float]] = []
        self._steady: list[tuple[float, ...]] = []

    def add(self, rates: dict[str, float], steady: Sequence[float]) -> None:
        self._rates.append({STEADY: statistics.mean(steady), **rates})
        self._steady.append(tuple(steady))

    def clean(self, deviation: float) -> list[dict[str, float]]:
        return [
            rates for rates, is_clean in zip(self._rates, undisturbed(self._steady, deviation), strict=True) if is_clean
        ]

    def __len__(self) -> int:
        return len(self._rates)


def undisturbed(steady: Sequence[Sequence[float]], deviation: float) -> list[bool]:
    """Return for each round whether all its rates of the operator are within `deviation` of their overall median."""
    median = statistics.median(rate for rates in steady for rate in rates)
    return [all(abs(rate / median - 1) <= deviation for rate in rates) for rates in steady]


def over_http(port: int, path: Callable[[Case], str], form: Form) -> Calls:
    """Return a way through a server. Raises RuntimeError if its answers to the shorter cases are wrong."""
    for case in CASES[:2]:
        status, headers, body = ask(port, path(case), form, case)
        if status != 200:
            raise RuntimeError(f"{path(case)}: {status} {body[:2000].decode(errors='replace')}")
        answers, truth = form.read(headers, body), case.truth()
        for name, right in truth.items():
            error = np.abs(answers[name] - right).max() / np.abs(right).max()
            if not error <= BOUND:
                raise RuntimeError(f"{path(case)}: {name} of {case.name} is off by {error:.1e} of its largest value")
    requests = {case: form.request(path(case), case) for case in CASES}

    def calls(case: Case, count: int) -> float:
        return max(timed.ended for timed in drive(port, [requests[case]] * count, CONNECTIONS))

    return calls


def in_process(child: subprocess.Popen[str], way: str) -> Calls:
    assert child.stdin is not None
    assert child.stdout is not None
    to, out = child.stdin, child.stdout

    def calls(case: Case, count: int) -> float:
        request = {"way": way, "shape": case.shape, "gradient": case.gradient, "calls": count}
        to.write(json.dumps(request) + "\n")
        to.flush()
        return float(out.readline())

    for case in CASES:  # warm-up: imports, and makes pools
        calls(case, 1)
    return calls


class Running(NamedTuple):
    port: int  # of the service
    ways: dict[str, Calls]
    versions: dict[str, str]


@contextlib.contextmanager
def running(wanted: Sequence[str]) -> Iterator[Running]:
    """Start the service, its peers, and the operator in processes; yield every way that can be timed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, str(HERE / "in_process.py")]
    ways, versions = {}, {}
    with contextlib.ExitStack() as stack:
        _, port, _ = stack.enter_context(service())
        path = {False: "/attention", True: "/attention/grad"}
        ways[OURS] = over_http(port, lambda case: path[case.gradient], SAFETENSORS)
        for peer in PEERS:
            if peer.packages and peer.environment not in wanted:
                continue
            ways[peer.name] = over_http(stack.enter_context(started(peer)), peer.path, peer.form)
            if peer.packages:
                versions[peer.name] = installed_version(peer)
        torch = stack.enter_context(process(command, **pipes))
        with environment_of_the_engine():
            kernels = stack.enter_context(process(command, **pipes))
        for name, way in IN_PROCESS.items():
            ways[name] = in_process(torch if way.startswith("sdpa") else kernels, way)
        yield Running(port, ways, versions)


def counts(ways: dict[str, Calls], seconds: float) -> dict[Case, dict[str, int]]:
    """Return the calls of each way in a round, a multiple of the connections; 0 for a way that is too slow."""
    planned: dict[Case, dict[str, int]] = {}
    for case in CASES:
        planned[case] = {}
        for name, calls in ways.items():
            if calls(case, 1) > SLOWEST:
                planned[case][name] = 0
                continue
            rate = 2 * CONNECTIONS / calls(case, 2 * CONNECTIONS)
            planned[case][name] = CONNECTIONS * math.ceil(rate * seconds / CONNECTIONS)
    return planned


def timed_rounds(ways: dict[str, Calls], rounds: int, seconds: float) -> dict[Case, Rounds]:
    planned = counts(ways, seconds)
    measured = {case: Rounds() for case in CASES}
    for number in range(rounds):
        for case, rows in measured.items():
            names = [name for name, count in planned[case].items() if count and name != STEADY]
            turn = number * len(names) // rounds
            steady = [planned[case][STEADY] / ways[STEADY](case, planned[case][STEADY])]
            order = names[turn:] + names[:turn]
            rates = {name: planned[case][name] / ways[name](case, planned[case][name]) for name in order}
            steady.append(planned[case][STEADY] / ways[STEADY](case, planned[case][STEADY]))
            rows.add(rates, steady)
            print(f"round {number + 1} of {rounds}, {case.name}: ours {rates[OURS]:.1f}/s, op {steady}", flush=True)
    return measured


def timed_mixed(at: Running, lengths: str, repetitions: int, deviation: float) -> dict[str, Any]:
    """Time requests of many lengths (mixed.py). The summary has only undisturbed repetitions."""
    chosen = mixed.cases(lengths, seed=0)
    requests = [SAFETENSORS.request("/attention/grad" if case.gradient else "/attention", case) for case in chosen]
    runs, steady = [], []

    def operator() -> float:
        return CONNECTIONS / at.ways[STEADY](CASES[-1], CONNECTIONS)

    for number in range(repetitions):
        before = operator()
        runs.append(mixed.repetition(at.port, requests, CONNECTIONS, seed=number + 1))
        steady.append((before, operator()))
        print(f"mixed, {lengths}, {number + 1} of {repetitions}: {mixed.summary(runs[-1:])}", flush=True)
    clean_runs = [each for each, clean in zip(runs, undisturbed(steady, deviation), strict=True) if clean]
    return {"repetitions": len(clean_runs), "thrown_away": len(runs) - len(clean_runs), **mixed.summary(clean_runs)}


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return each way's requests per second, and our rate over it in the same round. Empty without rounds."""
    table = {}
    for name in rounds[0] if rounds else ():
        rates = [rates_of_round[name] for rates_of_round in rounds]
        ratios = [rates_of_round[OURS] / rates_of_round[name] for rates_of_round in rounds]
        table[name] = {
            "rps": round(statistics.median(rates), 2),
            "least": round(min(rates), 2),
            "most": round(max(rates), 2),
            "ours_over_it": round(statistics.median(ratios), 3),
        }
    return table


def targets(tables: dict[Case, dict[str, dict[str, float]]], tails: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for case, table in tables.items():
        for least, what, peers in WANTED[case.length]:
            present = [name for name in peers if name in table]
            if present:
                fastest = max(present, key=lambda name: table[name]["rps"])
                label = f"{case.name}: over {what}" + (f" ({fastest})" if len(peers) > 1 else "")
                rows.append(target(label, table[fastest]["ours_over_it"], "times", least=least))
    for lengths, figures in tails.items():
        if figures["repetitions"]:
            label = f"mixed, {lengths} lengths: p99 / p50 at {mixed.LOAD:.0%} of the saturated rate"
            rows.append(target(label, figures["latency_p99_over_p50"], "times", most=TAIL))
    return rows


def print_table(result: dict[str, Any]) -> None:
    for case, figures in result["cases"].items():
        print(f"\n{case}: {figures['rounds']} rounds, {figures['thrown_away']} thrown away")
        for name, row in figures["ways"].items():
            text = f"{row['rps']:>10.1f}/s {row['ours_over_it']:>8.2f}" if isinstance(row, dict) else row
            print(f"  {name:<36} {text}")
    for lengths, figures in result["mixed"].items():
        print(f"\nmixed, {lengths}: {figures}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    wanted = INSTALLABLE if "all" in args.peers else args.peers
    for peer in PEERS:
        if peer.environment in wanted:
            install(peer)
    with running(wanted) as at:
        measured = timed_rounds(at.ways, args.rounds, args.seconds)
        tails = {name: timed_mixed(at, name, args.repetitions, args.deviation) for name in mixed.LENGTHS}
    clean = {case: rounds.clean(args.deviation) for case, rounds in measured.items()}
    tables = {case: medians(rounds) for case, rounds in clean.items()}
    absent = {peer.name: "not installed" for peer in PEERS if peer.name not in at.ways}
    slow = f"not measured: a call takes over {SLOWEST:g} s"
    unmeasured = {case: dict.fromkeys(at.ways, slow if rounds else NO_ROUND) for case, rounds in clean.items()}
    result = {
        "environment": {"peers": at.versions},
        "connections": CONNECTIONS,
        "cases": {
            case.name: {
                "rounds": len(clean[case]),
                "thrown_away": len(measured[case]) - len(clean[case]),
                "ways": unmeasured[case] | absent | table,
            }
            for case, table in tables.items()
        },
        "mixed": tails,
        "targets": targets(tables, tails),
    }
    print_table(result)
    if not (all(clean.values()) and all(figures["repetitions"] for figures in tails.values())):
        result["targets"].append(target("cases that were measured", 0.0, "all", least=1.0))
    return result


if __name__ == "__main__":
    run(
        measure,
        "throughput",
        peers=Option([], "peers to install and time", choices=["all", *INSTALLABLE], many=True),
        rounds=Option(6, "rounds of each case"),
        seconds=Option(0.6, "seconds of each way in a round"),
        repetitions=Option(3, "repetitions of mixed requests"),
        deviation=Option(0.15, "largest deviation of the operator from its median in a round that counts"),
    )
