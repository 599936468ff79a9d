"""Time small requests while the service does other work: `python benchmarks/fairness.py [beside]`.

By default, other clients send the most expensive requests. Each row has one kind of large request, 65,536 sequences of
one token, over one protocol. Four clients in a separate process each keep one such request in flight, and one client
sends small requests one after the other. In the last rows, all large requests use one API key, which has a limit, and
the small requests use another key. Writes the percentiles of the small requests, and the seconds of a large request
alone, to fairness-<cpu>.json. Takes about five minutes.

With `beside`, the other work is a benchmark of a few rows through `POST /benchmark`, and the small requests arrive in
an open loop with Poisson arrivals. Each round runs the requests alone, the benchmark alone, then both together.
Targets: the p99 latency of the requests rises by at most the longest time slice of a benchmark, and no median of the
benchmark changes by 10% or more. Writes beside-<cpu>.json. Takes two minutes on two cores.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from forms import OIP_BINARY, SAFETENSORS, Case, Tensors, post
from load import drive
from protocol import METHOD, PATH, UNLIMITED, message
from record import percentile
from runner import SERVICE, Args, apart, option, run, run_named, target
from serving import SMALL, free_ports, service

import flashpoint
from flashpoint_contract.schemas.benchmark import BenchmarkRow

COUNT = 65536
LARGE = 4  # number of large requests in flight
PATIENCE = 120.0  # timeout of one answer in seconds; the run fails after it
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
    "reference": {"backend": "reference"},
}
KINDS = ("plain", "mask", "kv_lengths", "thd", *OPTIONS)
PROTOCOLS = ("http", "oip", "grpc")
LIMITS = {"1 MFLOP/s": {"flops_per_second": 1e6}, "one request at a time": {"concurrent": 1}}
CASE = Case(128, gradient=False)
# Requests per second: 1/20 of what two cores can answer, so that no request waits while no `POST /benchmark` runs.
RATE = 40.0
# The body of `POST /benchmark`. Its calls take from a tenth of a time slice of the benchmark to more than a whole one.
GRID = {
    "shapes": [{"batch": 1, "q_heads": 8, "q_len": length, "head_dim": 64} for length in (256, 1024)],
    "backends": ["naive", "sdpa_flash", "cpu", "tiled"],
    "directions": ["forward"],
    "relative_precision": 0.02,
    "max_seconds": 1.5,
}


def large(kind: str) -> tuple[Tensors, dict[str, Any]]:
    tensors: dict[str, Any] = dict.fromkeys("qkv", np.ones((COUNT, 1, 1, 1), np.float32))
    options = dict(OPTIONS.get(kind, {}))
    if kind == "mask":
        tensors["attn_mask"] = np.zeros((COUNT, 1, 1, 1), np.float32)
    elif kind == "kv_lengths":
        tensors["kv_lengths"] = np.ones(COUNT, np.int64)
    elif kind == "thd":
        starts = np.arange(COUNT + 1, dtype=np.int64)
        tensors = {name: t[:, 0] for name, t in tensors.items()} | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options["layout"] = "thd"
    return tensors, options


def caller(
    protocol: str, ports: dict[str, int], tensors: Tensors, options: dict[str, Any], key: str
) -> Callable[[], bool]:
    """Return a function that sends one prepared request over a persistent connection; it returns False if refused."""
    bearer = f"Bearer {key}"
    if protocol == "grpc":
        request = message(tensors)
        for name, value in options.items():
            kind = {int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
            setattr(request.parameters[name], kind, value)
        prepared = request.SerializeToString()
        channel = grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}", options=UNLIMITED)

        def over_grpc() -> bool:
            try:
                channel.unary_unary(METHOD)(prepared, timeout=PATIENCE, metadata=[("authorization", bearer)])
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                return False
            return True

        return over_grpc
    connection = http.client.HTTPConnection("127.0.0.1", ports["http"], timeout=PATIENCE)
    path, form = (PATH, OIP_BINARY) if protocol == "oip" else ("/attention", SAFETENSORS)
    headers, body = form.whole(tensors, **options)

    def over_http() -> bool:
        connection.request("POST", path, body, {**headers, "Authorization": bearer})
        answer = connection.getresponse()
        answer.read()
        if answer.status not in (200, 429):
            raise RuntimeError(f"{path}: {answer.status}")
        return answer.status == 200

    return over_http


def load(protocol: str, ports: dict[str, int], kind: str, key: str) -> dict[str, Callable[[], int]]:
    """Keep LARGE requests in flight while this process runs; return a function that counts the answers."""
    answered: list[bool] = []

    def send_until_the_end() -> None:
        send = caller(protocol, ports, *large(kind), key)
        while True:
            if send():
                answered.append(True)

    for _ in range(LARGE):
        threading.Thread(target=send_until_the_end, daemon=True).start()
    return {"answered": lambda: len(answered)}


def wait(port: int, at_least: int, at_most: int = 1 << 30) -> None:
    """Wait until the service holds between `at_least` and `at_most` requests. Raises RuntimeError after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    with flashpoint.Client(f"http://127.0.0.1:{port}", api_key="small-caller") as client:
        while not at_least <= client.info()["load"]["requests"] <= at_most:
            if time.monotonic() > deadline:
                raise RuntimeError("the load does not come, or does not end")
            time.sleep(0.01)


def row(
    protocol: str, ports: dict[str, int], kind: str, calls: int, *, key: str = "", limit: str = ""
) -> dict[str, Any]:
    """Measure one row of the result: small requests alone, one large request alone, and small beside large requests."""
    t = np.random.default_rng(0).random(SMALL, np.float32)
    small = caller("http", ports, dict.fromkeys("qkv", t), {}, "small-caller")
    alone = [answer_seconds(small) for _ in range(calls)]
    big = caller(protocol, ports, *large(kind), "small-caller")
    large_alone = [answer_seconds(big) for _ in range(1 if kind == "reference" else 3)]
    with apart(load, protocol, ports, kind, key or "small-caller") as ask:
        wait(ports["http"], 1 if limit else LARGE)
        before, began = ask("answered"), time.perf_counter()
        beside = []
        while len(beside) < calls or time.perf_counter() - began < 2.0:
            beside.append(answer_seconds(small))
        done = ask("answered") - before
    wait(ports["http"], 0, 0)
    result = {
        "kind": kind, "protocol": protocol, **({"limit": limit} if limit else {}),
        "large_alone_seconds": round(statistics.median(large_alone), 4), "large_answered": done,
        "small_calls": len(beside), "small_alone_ms": percentiles(alone, 50, 99, 100),
        "small_beside_ms": percentiles(beside, 50, 99, 100),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result


def answer_seconds(send: Callable[[], bool]) -> float:
    began = time.perf_counter()
    if not send():
        raise RuntimeError("a request of the measurement was refused")
    return time.perf_counter() - began


def percentiles(samples: list[float], *parts: int) -> dict[str, float]:
    """Return percentiles in milliseconds of samples in seconds."""
    return {f"p{part}": round(percentile(samples, part) * 1e3, 2) for part in parts}


def keys(path: Path) -> None:
    """Write API keys to the file `path`: one without limits for the small requests, and one for each item of LIMITS."""
    names = {"small-caller": {}, **{f"limited-{n}": limit for n, limit in enumerate(LIMITS.values())}}
    lines = []
    for name, limits in names.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines += [f"[{name}]", f'sha256 = "{digest}"', 'rights = ["attention", "info"]']
        lines += [f"{field} = {value}" for field, value in limits.items()]
    path.write_text("\n".join(lines) + "\n")


def fairness(args: Args) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        keys(file := Path(folder) / "keys.toml")
        ports = {"grpc": free_ports(1)[0]}
        os.environ |= {"FLASHPOINT_GRPC_PORT": str(ports["grpc"]), "FLASHPOINT_API_KEYS_FILE": str(file)}
        with service() as (_, ports["http"], _):
            for protocol in args.protocols:
                rows += [row(protocol, ports, kind, args.calls) for kind in args.kinds]
            for n, limit in enumerate(LIMITS):
                key = f"limited-{n}"
                rows += [row("http", ports, kind, args.calls, key=key, limit=limit) for kind in args.kinds]
    worst = max(one["small_beside_ms"]["p99"] for one in rows)
    targets = [target("p99 of a small request beside large ones", worst, "ms", most=250.0)]
    if "plain" in args.kinds:
        plain = max(one["large_alone_seconds"] for one in rows if one["kind"] == "plain")
        targets.append(target(f"{COUNT} sequences of one token, plain", plain, "seconds", most=1.0))
    return {"small_shape": SMALL, "large_in_flight": LARGE, "targets": targets, "rows": rows}


def traffic(port: int, seconds: float, seed: int) -> list[float]:
    """Send small requests with Poisson arrivals for `seconds`; return each latency in seconds from its arrival."""
    request = post(CASE.path, SAFETENSORS.write(CASE.tensors))
    arrivals = np.random.default_rng(seed).exponential(1 / RATE, int(RATE * seconds)).cumsum()
    return [timed.latency for timed in drive(port, [request] * len(arrivals), 16, arrivals.tolist())]


def benchmark_rows(port: int) -> list[BenchmarkRow]:
    with flashpoint.Client(f"http://127.0.0.1:{port}", timeout=120) as client:
        job = client.benchmark(**GRID).wait()
    if job.state != "done":
        raise RuntimeError(f"the benchmark is {job.state}: {job.errors}")
    return job.rows


def together(port: int, seed: int) -> tuple[list[float], list[BenchmarkRow]]:
    """Run traffic and benchmark together until the benchmark ends; return the latencies and the benchmark's rows."""
    latencies = []
    with ThreadPoolExecutor(1) as pool:
        benchmark = pool.submit(benchmark_rows, port)
        while not benchmark.done():
            latencies += traffic(port, 2.0, seed)
            seed += 1000
    return latencies, benchmark.result()


def beside(args: Args) -> dict[str, Any]:
    latencies: dict[str, list[float]] = {"alone": [], "beside": []}
    measured: dict[str, list[list[BenchmarkRow]]] = {"alone": [], "beside": []}
    with service() as (_, port, _):
        traffic(port, 1.0, 0)
        for number in range(args.rounds):
            latencies["alone"] += traffic(port, 10.0, number + 1)
            measured["alone"].append(benchmark_rows(port))
            seen, rows_beside = together(port, number + 100)
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
        "requests_a_second": RATE, "requests": {when: len(seen) for when, seen in latencies.items()},
        "latency_ms": {when: percentiles(seen, 50, 99) for when, seen in latencies.items()},
        "longest_slice_ms": round(max(slices), 2), "rows": table,
        "targets": [
            target("p99 of small requests beside a benchmark, more than alone", rise, "ms", most=max(slices)),
            target("a median of the benchmark beside traffic, moved by", moved, "of itself", most=0.1),
        ],
    }  # fmt: skip


if __name__ == "__main__":
    calls = option(200, "least number of small requests in a row")
    kinds, protocols = (option(names, choices=names, nargs="*") for names in (KINDS, PROTOCOLS))
    packages = (*SERVICE, "grpcio")
    run_named(
        fairness=partial(run, fairness, packages=packages, calls=calls, kinds=kinds, protocols=protocols),
        beside=partial(run, beside, rounds=option(3)),
    )
