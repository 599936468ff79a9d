"""Time the service over a socket beside its upper bounds, in one run: `python benchmarks/serving.py`.

The service is `flashpoint serve` with its defaults, on the CPU or on `--device cuda`. The upper bounds are bare uvicorn
(peers/bare_uvicorn.py) and the operator in a process without HTTP. All have the same malloc settings. Load comes over
one connection of `http.client`, read with `readinto`. Each round times every way in turn. The medians and their targets
go to benchmarks/results/serving-<device>.json and a table. Takes under two minutes. Exits with 1 if a target is missed.
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
SMALL = (1, 8, 128, 64)  # shape of q, k and v in the call whose latency is measured
START_SECONDS = 60.0
LARGE = 4  # rounds of large bodies per round of small calls: they take less time, and vary more

# Runs the operator as the engine does, with copies to and from a GPU if there is one. Reads a count from each line, and
# answers with the seconds of as many calls.
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
    """Seconds of one request: in total, and from the head of its answer to the last byte."""

    whole: float
    answer: float


class Connection:
    """A persistent connection that reads answers into one buffer."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._buffer = memoryview(bytearray(BIG + MIB))

    def post(self, path: str, body: bytes, **fields: str) -> Call:
        """Post `body`, a safetensors message unless there are header `fields`. Raises RuntimeError unless 200."""
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
    """Run a child process with the settings `MALLOC`; end it with SIGTERM, after a timeout with SIGKILL."""
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
    """Run `flashpoint serve`; yield its process, its port, and the seconds from its start until it was ready."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        command = [sys.executable, "-m", "flashpoint_server.cli.serve", "--port", "0", "--device", device]
        with process(command, stderr=log) as child:
            port = until(lambda: listening(log.fileno()), child)
            until(lambda: ready(port), child)
            yield child, port, time.perf_counter() - began


def until(check: Callable[[], int | None], child: subprocess.Popen[str]) -> int:
    """Return the first true value of `check`. Raises RuntimeError if the child ends, or after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        if value := check():
            return value
        time.sleep(0.01)
    raise RuntimeError(f"{child.args!r} did not become ready")


def listening(log: int) -> int | None:
    """Return the port, or None while the log does not have it."""
    for line in os.pread(log, MIB, 0).splitlines(keepends=True):
        if line.endswith(b"\n") and (event := json.loads(line))["event"] == "listening":
            return int(event["port"])
    return None


def ready(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200


def large_bodies(ours: Connection, bare: Connection, rounds: int, measured: Measured) -> None:
    """Time 64 MiB in and 64 MiB out, with almost no computation. The first round does not count."""
    keys = BIG // 2 // 256  # 64 float32 each, in k and in v; the query attends to one of them
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
    """Time sequential calls at `SMALL`, beside bare uvicorn with the same bytes, and the operator alone."""
    t = np.random.default_rng(0).random(SMALL, np.float32)
    body = message({"q": t, "k": t, "v": t})
    with operator(SMALL, device) as alone:
        for counts in range(rounds + 1):
            samples = {
                "bare echo": [bare.post("/echo", body).whole for _ in range(calls)],
                "call": [ours.post("/attention", body).whole for _ in range(calls)],
                "bare exchange": [bare.post(f"/bytes/{t.nbytes}", body).whole for _ in range(calls)],
                "operator": alone(calls),
            }
            if counts:
                for name, seconds in samples.items():
                    measured.add(name, *seconds)


@contextlib.contextmanager
def environment_of_the_engine() -> Iterator[None]:
    """Set the variables that the service gives its engines, so that a child computes as they do."""
    from flashpoint_server.processes.processes import ENGINE_VARIABLES

    before = dict(os.environ)
    os.environ.update({name: value for name, value in ENGINE_VARIABLES.items() if name not in before})
    try:
        yield
    finally:
        for name in ENGINE_VARIABLES.keys() - before.keys():
            del os.environ[name]


def resident(child: subprocess.Popen[str]) -> dict[str, float]:
    """Return the resident MiB of the HTTP process and of its engine; shared memory counts in both."""
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
    sizes = {}
    for count in range(late + 1):
        if count in (early, late):
            sizes["early" if count == early else "late"] = resident(child)
        ours.post(*bodies[count % len(bodies)])
    return sizes


@contextlib.contextmanager
def operator(shape: tuple[int, ...], device: str = "cpu") -> Iterator[Callable[[int], list[float]]]:
    """Run the operator in a separate process; yield a function that returns the seconds of each of `count` calls."""
    command = [sys.executable, "-c", OPERATOR, json.dumps(shape), device]
    with environment_of_the_engine(), process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        to, out = child.stdin, child.stdout
        assert to is not None
        assert out is not None

        def calls(count: int) -> list[float]:
            to.write(f"{count}\n")
            to.flush()
            taken: list[float] = json.loads(out.readline())
            return taken

        yield calls


@contextlib.contextmanager
def bare_uvicorn() -> Iterator[int]:
    """Run bare uvicorn, the upper bound of a Python service, and yield its port."""
    command = [sys.executable, str(ROOT / "benchmarks/peers/bare_uvicorn.py")]
    with process(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield int(child.stdout.readline())


def report(measured: Measured, resident_mib: dict[str, dict[str, float]], requests: int) -> dict[str, Any]:
    median = measured.median
    bound = median("bare echo") + median("operator")
    growth = max(resident_mib["late"][name] / size for name, size in resident_mib["early"].items())
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
        "resident_mib": {
            when: {name: round(size, 1) for name, size in of.items()} for when, of in resident_mib.items()
        },
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    measured = Measured()
    for _ in range(args.starts - 1):
        with service(args.device) as (_, _, seconds):
            measured.add("start", seconds)
    with bare_uvicorn() as bare_port, service(args.device) as (child, port, seconds):
        measured.add("start", seconds)
        with contextlib.closing(Connection(port)) as ours, contextlib.closing(Connection(bare_port)) as bare:
            small_calls(ours, bare, args.device, args.rounds, args.calls, measured)
            resident_mib = memory(ours, child, args.requests // 10, args.requests)
            large_bodies(ours, bare, LARGE * args.rounds, measured)
    result = report(measured, resident_mib, args.requests)
    for name in ("mib_per_second", "median_microseconds", "resident_mib"):
        print(f"{name}: {result[name]}")
    return {"rounds": args.rounds, "calls": args.calls, **result}


if __name__ == "__main__":
    run(
        measure,
        "serving",
        device=Option("cpu", "device of the service and of the operator"),
        rounds=Option(15, "rounds of each comparison"),
        calls=Option(60, "small calls of each way in a round"),
        starts=Option(3, "timed starts of the service"),
        requests=Option(10_000, "requests before the last look at memory; the first look is after a tenth"),
    )
