"""Time the service over a socket beside the ceilings of its kind, in one run: `python benchmarks/serving.py`.

The service is `flashpoint serve` with its defaults, on the CPU or on `--device cuda`; the ceilings are bare uvicorn
(peers/bare_uvicorn.py) and the operator in a process without HTTP. All have the same malloc settings. Load comes over
one connection of `http.client`, read with `readinto`. Each round times every way in turn; the medians, and what they
were to reach, go to benchmarks/results/serving-<device>.json and a table. Takes under two minutes. Exits with 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
from runner import MALLOC, ROOT, Measured, Option, in_turn, run, target

from flashpoint_contract import wire

MIB = 1 << 20
BIG = 64 * MIB
SMALL = (1, 8, 128, 64)  # q, k and v of the call whose latency is measured
START_SECONDS = 60.0
LARGE = 4  # rounds of large bodies for one of small calls: they take less time, and vary more

# The operator as the engine runs it, alone in a process, to a GPU and back where there is one: a line with a count in,
# the seconds of each call out.
OPERATOR = """
import json, sys, time, torch
from flashpoint_kernels import Options, Problem, available_backends, run
shape, device = json.loads(sys.argv[1]), sys.argv[2]
backend, pinned = available_backends(device)[0], device != "cpu"
tensors = {name: torch.rand(shape, pin_memory=pinned) for name in "qkv"}
answer = torch.empty(shape, pin_memory=pinned)
def call():
    start = time.perf_counter()
    problem = Problem.create({name: t.to(device, non_blocking=True) for name, t in tensors.items()}, Options())
    run([problem], backend)
    if pinned:
        answer.copy_(problem.outputs["o"])
    return time.perf_counter() - start
call()
for line in sys.stdin:
    print(json.dumps([call() for _ in range(int(line))]), flush=True)
"""


class Call(NamedTuple):
    """Seconds of one request: all of it, and from its answer's head to the last byte of the answer."""

    whole: float
    answer: float


class Connection:
    """One kept connection, its answers read into a buffer that is there already."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._buffer = memoryview(bytearray(BIG + MIB))

    def post(self, path: str, body: bytes, **fields: str) -> Call:
        """Post `body`, a safetensors message unless the header `fields` name another type."""
        fields = {name.replace("_", "-"): value for name, value in fields.items()} or {"Content-Type": wire.MEDIA_TYPE}
        began = time.perf_counter()
        self._http.request("POST", path, body, fields)
        response = self._http.getresponse()
        answered = time.perf_counter()
        length = int(response.headers["Content-Length"])
        rest = self._buffer[:length]
        while rest:
            rest = rest[response.readinto(rest) :]
        ended = time.perf_counter()
        response.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {bytes(self._buffer[:length]).decode()}")
        return Call(ended - began, ended - answered)

    def close(self) -> None:
        self._http.close()


def message(tensors: dict[str, np.ndarray[Any, Any]], **options: Any) -> bytes:
    infos = [(name, t.dtype.name, t.shape) for name, t in tensors.items()]
    return wire.build_head(infos, wire.encode_options(options)) + b"".join(t.tobytes() for t in tensors.values())


@contextlib.contextmanager
def process(command: list[str], **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """A child with the malloc settings of all, ended as an operator would."""
    child = subprocess.Popen(command, env={**os.environ, **MALLOC}, text=True, **pipes)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def service(device: str = "cpu") -> Iterator[tuple[subprocess.Popen[str], int, float]]:
    """`flashpoint serve`: its process, its port, and the seconds from its start until it was ready."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        command = [sys.executable, "-m", "flashpoint_server.cli.serve", "--port", "0", "--device", device]
        with process(command, stderr=log) as child:
            port = until(lambda: listening(log.fileno()), child)
            until(lambda: ready(port), child)
            yield child, port, time.perf_counter() - began


def until(found: Callable[[], int | None], child: subprocess.Popen[str]) -> int:
    """Return the first value of `found` that is not None. Raises RuntimeError if the child ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.01)  # between two looks
    raise RuntimeError(f"{child.args!r} did not become ready")


def listening(log: int) -> int | None:
    """The port, once the log names it."""
    for line in os.pread(log, MIB, 0).splitlines(keepends=True):
        if line.endswith(b"\n") and (event := json.loads(line))["event"] == "listening":
            return int(event["port"])
    return None


def ready(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200


def large_bodies(ours: Connection, bare: Connection, rounds: int, measured: Measured) -> None:
    """64 MiB in with next to nothing to compute, and 64 MiB out, in turning order. The first round does not count."""
    keys = BIG // 2 // 256  # 64 float32 each, in k and in v; one of them is attended to
    k = np.zeros((1, 1, keys, 64), np.float32)
    lengths = np.array([1], np.int64)
    upload = message({"q": k[:, :, :1], "kv_lengths": lengths, "k": k, "v": k})
    rows = BIG // 1024  # 256 float32 each, of o; one of them is computed
    q = np.zeros((1, 1, rows, 1), np.float32)
    download = message({"q": q, "k": q[:, :, :1], "v": np.ones((1, 1, 1, 256), np.float32), "q_lengths": lengths})
    ways = {
        "bare discard": lambda: bare.post("/discard", upload).whole,
        "ingest": lambda: ours.post("/attention", upload).whole,
        "bare response": lambda: bare.post(f"/bytes/{BIG}", b"").answer,
        "answer": lambda: ours.post("/attention", download).answer,
    }
    in_turn(ways, rounds, measured)


def small_calls(ours: Connection, bare: Connection, device: str, rounds: int, calls: int, measured: Measured) -> None:
    """One call after the other at `SMALL`, beside bare uvicorn with the same bytes, and the operator alone."""
    t = np.random.default_rng(0).random(SMALL, np.float32)
    body = message({"q": t, "k": t, "v": t})
    with operator(SMALL, device) as alone:
        for counts in range(rounds + 1):
            seen = {
                "bare echo": [bare.post("/echo", body).whole for _ in range(calls)],
                "call": [ours.post("/attention", body).whole for _ in range(calls)],
                "bare exchange": [bare.post(f"/bytes/{t.nbytes}", body).whole for _ in range(calls)],
                "operator": alone(calls),
            }
            if counts:
                for name, seconds in seen.items():
                    measured.add(name, *seconds)


@contextlib.contextmanager
def environment_of_the_engine() -> Iterator[None]:
    """The variables that the service gives its engines, for a child that computes as they do."""
    from flashpoint_server.ipc.processes import ENGINE_VARIABLES

    before = dict(os.environ)
    os.environ.update({name: value for name, value in ENGINE_VARIABLES.items() if name not in before})
    try:
        yield
    finally:
        for name in ENGINE_VARIABLES.keys() - before.keys():
            del os.environ[name]


def resident(child: subprocess.Popen[str]) -> dict[str, float]:
    """MiB of the HTTP process and of its engine, shared memory in both."""
    http_process = psutil.Process(child.pid)
    (engine,) = http_process.children()
    return {"http": http_process.memory_info().rss / MIB, "engine": engine.memory_info().rss / MIB}


def memory(ours: Connection, child: subprocess.Popen[str], early: int, late: int) -> dict[str, dict[str, float]]:
    """Return the resident memory after `early` and after `late` requests of many shapes, forward and gradients."""
    bodies = []
    for length in (1, 7, 16, 33, 64, 96, 128, 200):
        t = np.ones((1, 4, length, 32), np.float32)
        bodies.append(("/attention", message({"q": t, "k": t, "v": t}, causal=True, return_lse=True)))
        bodies.append(("/attention/grad", message({"q": t, "k": t, "v": t, "do": t})))
    found = {}
    for count in range(late + 1):
        if count in (early, late):
            found["early" if count == early else "late"] = resident(child)
        ours.post(*bodies[count % len(bodies)])
    return found


@contextlib.contextmanager
def operator(shape: tuple[int, ...], device: str = "cpu") -> Iterator[Callable[[int], list[float]]]:
    """The operator in a process of its own: a function that returns the seconds of so many calls."""
    command = [sys.executable, "-c", OPERATOR, json.dumps(shape), device]
    with environment_of_the_engine(), process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        to, out = child.stdin, child.stdout
        assert to is not None
        assert out is not None

        def calls(count: int) -> list[float]:
            to.write(f"{count}\n")
            to.flush()
            found: list[float] = json.loads(out.readline())
            return found

        yield calls


@contextlib.contextmanager
def bare_uvicorn() -> Iterator[int]:
    """The port of bare uvicorn, the ceiling of a Python service."""
    command = [sys.executable, str(ROOT / "benchmarks/peers/bare_uvicorn.py")]
    with process(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield int(child.stdout.readline())


def report(measured: Measured, kept: dict[str, dict[str, float]], requests: int) -> dict[str, Any]:
    median = measured.median
    bound = median("bare echo") + median("operator")
    growth = max(kept["late"][name] / size for name, size in kept["early"].items())
    big = ("ingest", "bare discard", "answer", "bare response")
    small = ("call", "bare echo", "bare exchange", "operator")
    return {
        "targets": [
            target("64 MiB in / bare uvicorn discarding", measured.ratio("bare discard", "ingest"), "rate", least=0.9),
            target("64 MiB out / bare uvicorn's", measured.ratio("bare response", "answer"), "rate", least=0.9),
            target("small call / (bare uvicorn's echo + operator)", median("call") / bound, "time", most=1.3),
            target("ready after its start", median("start"), "seconds", most=5.0),
            target(f"resident after {requests} calls / a tenth of them", growth, "size", most=1.05),
        ],
        "small_call_shape": SMALL,
        "mib_per_second": {name: round(BIG / MIB / median(name)) for name in big},
        "median_microseconds": {name: round(median(name) * 1e6) for name in small},
        "resident_mib": {when: {name: round(size, 1) for name, size in of.items()} for when, of in kept.items()},
    }


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    measured = Measured()
    for _ in range(asked.starts - 1):
        with service(asked.device) as (_, _, seconds):
            measured.add("start", seconds)
    with bare_uvicorn() as bare_port, service(asked.device) as (child, port, seconds):
        measured.add("start", seconds)
        with contextlib.closing(Connection(port)) as ours, contextlib.closing(Connection(bare_port)) as bare:
            small_calls(ours, bare, asked.device, asked.rounds, asked.calls, measured)
            kept = memory(ours, child, asked.requests // 10, asked.requests)
            large_bodies(ours, bare, LARGE * asked.rounds, measured)
    found = report(measured, kept, asked.requests)
    for name in ("mib_per_second", "median_microseconds", "resident_mib"):
        print(f"{name}: {found[name]}")
    return {"rounds": asked.rounds, "calls": asked.calls, **found}


if __name__ == "__main__":
    run(
        measure,
        "serving",
        device=Option("cpu", "of the service and of the operator"),
        rounds=Option(15, "of each comparison"),
        calls=Option(60, "small calls of each way in a round"),
        starts=Option(3, "of the service, to time them"),
        requests=Option(10_000, "before memory is looked at, and after a tenth"),
    )
