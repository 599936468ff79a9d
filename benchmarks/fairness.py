"""Time small requests while other clients send the most expensive requests: `python benchmarks/fairness.py`.

Each row has one kind of large request, 65,536 sequences of one token, over one protocol. Four clients in a separate
process each keep one such request in flight, and one client sends small requests one after the other. In the last rows,
all large requests use one API key, which has a limit, and the small requests use another key. The percentiles of the
small requests, and the seconds of a large request alone, go to benchmarks/results/fairness-<cpu>.json. Takes about five
minutes. Exits with 1 if a target is missed.
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
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from forms import OIP_BINARY, SAFETENSORS, Tensors
from protocol import METHOD, PATH, UNLIMITED, message
from record import percentile
from runner import SERVICE, Args, apart, option, run, target
from serving import SMALL, free_ports, service

import flashpoint

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


def large(kind: str) -> tuple[Tensors, dict[str, Any]]:
    one = np.ones((COUNT, 1, 1, 1), np.float32)
    tensors: dict[str, Any] = {"q": one, "k": one, "v": one}
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
    """Return one row of the table: small requests alone, a large one alone, and small requests beside large ones."""
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
        "kind": kind,
        "protocol": protocol,
        **({"limit": limit} if limit else {}),
        "large_alone_seconds": round(statistics.median(large_alone), 4),
        "large_answered": done,
        "small_calls": len(beside),
        "small_alone_ms": percentiles(alone),
        "small_beside_ms": percentiles(beside),
    }
    print(json.dumps(result), flush=True)
    return result


def answer_seconds(send: Callable[[], bool]) -> float:
    began = time.perf_counter()
    if not send():
        raise RuntimeError("a request of the measurement was refused")
    return time.perf_counter() - began


def percentiles(samples: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds of samples in seconds."""
    return {f"p{part}": round(percentile(samples, part) * 1e3, 2) for part in (50, 99, 100)}


def keys(path: Path) -> None:
    """Write API keys to the file `path`: one without limits for the small requests, and one for each item of LIMITS."""
    names = {"small-caller": {}, **{f"limited-{n}": limit for n, limit in enumerate(LIMITS.values())}}
    lines = []
    for name, limits in names.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines += [f"[{name}]", f'sha256 = "{digest}"', 'rights = ["attention", "info"]']
        lines += [f"{field} = {value}" for field, value in limits.items()]
    path.write_text("\n".join(lines) + "\n")


def measure(args: Args) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        keys(file := Path(folder) / "keys.toml")
        ports = {"grpc": free_ports(1)[0]}
        os.environ |= {"FLASHPOINT_GRPC_PORT": str(ports["grpc"]), "FLASHPOINT_API_KEYS_FILE": str(file)}
        with service() as (_, ports["http"], _):
            for protocol in args.protocols:
                rows += [row(protocol, ports, kind, args.calls) for kind in args.kinds]
            for n, limit in enumerate(LIMITS):
                for kind in args.kinds:
                    rows.append(row("http", ports, kind, args.calls, key=f"limited-{n}", limit=limit))
    worst = max(one["small_beside_ms"]["p99"] for one in rows)
    targets = [target("p99 of a small request beside large ones", worst, "ms", most=250.0)]
    if "plain" in args.kinds:
        plain = max(one["large_alone_seconds"] for one in rows if one["kind"] == "plain")
        targets.append(target(f"{COUNT} sequences of one token, plain", plain, "seconds", most=1.0))
    return {"small_shape": SMALL, "large_in_flight": LARGE, "targets": targets, "rows": rows}


if __name__ == "__main__":
    run(
        measure,
        "fairness",
        packages=(*SERVICE, "grpcio"),
        calls=option(200, "least number of small requests in a row"),
        kinds=option(KINDS, choices=KINDS, nargs="*"),
        protocols=option(PROTOCOLS, choices=PROTOCOLS, nargs="*"),
    )
