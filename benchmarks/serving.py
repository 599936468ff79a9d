"""Compare the service over a socket with its upper bounds in one run: `python benchmarks/serving.py`, two minutes.

The service is `flashpoint serve` with its defaults, on the CPU or on `--device cuda`. The upper bounds are bare uvicorn
(peers/bare_uvicorn.py) and the operator in a process without HTTP. All have the same malloc settings. The load uses one
connection of `http.client` and reads answers with `readinto`. Each round times the service and each bound.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import psutil
from forms import SAFETENSORS, Tensors
from runner import MALLOC, ROOT, Args, apart, in_turn, option, ratio, run, seconds, target

MIB = 1 << 20
BIG = 64 * MIB
SMALL = (1, 8, 128, 64)  # shape of q, k and v in the small call whose latency is measured
START_SECONDS, ENDING_SECONDS = 600.0, 30.0  # a start takes 4 s on an idle machine, minutes on a busy one
LARGE = 4  # rounds of large bodies per round of small calls: large bodies take less time, and their times vary more

Child = subprocess.Popen[str]


class Call(NamedTuple):
    """Seconds of one request: in total, and from the head of the answer to its last byte."""

    whole: float
    answer: float


class Connection(http.client.HTTPConnection):
    """A persistent connection that reads every answer into the same memory."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, timeout=60)
        self._answer = memoryview(bytearray(BIG + MIB))

    def post(self, path: str, headers: Mapping[str, str] = MappingProxyType({}), body: bytes = b"") -> Call:
        """Send a request. Raises RuntimeError if the answer's status is not 200."""
        began = time.perf_counter()
        self.request("POST", path, body, headers)
        response = self.getresponse()
        answered = time.perf_counter()
        length = int(response.headers["Content-Length"])
        rest = self._answer[:length]
        while rest:
            rest = rest[response.readinto(rest) :]
        ended = time.perf_counter()
        response.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {bytes(self._answer[:length]).decode()}")
        return Call(ended - began, ended - answered)


def free_ports(count: int) -> list[int]:
    """Return free ports, for servers that cannot choose a free port and report it."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def process(command: Sequence[str], variables: Mapping[str, str] | None = None, **how: Any) -> Iterator[Child]:
    """Run a child process with the settings `MALLOC` and `variables`; at the end, stop it and all its child processes.

    The child gets SIGTERM and stops its own child processes; those that remain after ENDING_SECONDS, as with several
    peers, get SIGKILL.
    """
    with subprocess.Popen(command, env={**os.environ, **MALLOC, **(variables or {})}, text=True, **how) as child:
        try:
            yield child
        finally:
            family = []
            if child.poll() is None:
                family = [root := psutil.Process(child.pid), *root.children(recursive=True)]
                child.terminate()
            _, alive = psutil.wait_procs(family, timeout=ENDING_SECONDS)
            for each in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


@contextlib.contextmanager
def service(device: str = "cpu", *flags: str) -> Iterator[tuple[Child, int, float]]:
    """Run `flashpoint serve`; yield its process, its port, and the seconds that it took to become ready."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        command = [sys.executable, "-P", "-m", "flashpoint_server.cli.serve", "--port", "0", "--device", device, *flags]
        with process(command, stderr=log) as child:
            port = until(lambda: listening(log.fileno()), child)
            until(lambda: ready(port), child)
            yield child, port, time.perf_counter() - began


def until(check: Callable[[], int | None], child: Child) -> int:
    """Return the first true value of `check()`. Raises RuntimeError if the child ends, or after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        if value := check():
            return value
        time.sleep(0.01)
    raise RuntimeError(f"{child.args!r} did not become ready")


def listening(log: int) -> int | None:
    """Return the port that the service logged, or None while the log does not contain it."""
    for line in os.pread(log, MIB, 0).splitlines(keepends=True):
        if line.endswith(b"\n") and (event := json.loads(line))["event"] == "listening":
            return int(event["port"])
    return None


def ready(port: int) -> bool:
    with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10):
        return True  # the status of an error raises HTTPError, which is an OSError
    return False


def with_bytes(port: int, call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `call`, and the bytes of all bodies that the service receives and sends during it."""

    def carried() -> float:
        counters = (b"flashpoint_received_bytes_total ", b"flashpoint_sent_bytes_total ")
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return sum(float(line.split()[1]) for line in answer if line.startswith(counters))

    before = carried()
    of_metrics = carried() - before  # bytes of the answer with the metrics
    result = call()
    return result, carried() - before - 2 * of_metrics


def large_bodies(ours: Connection, bare: Connection, rounds: int) -> list[dict[str, float]]:
    """Time 64 MiB in and 64 MiB out, with almost no computation."""
    upload, download = map(SAFETENSORS.whole, exchanges(BIG).values())
    ways = {
        "bare discard": lambda: bare.post("/discard", *upload).whole,
        "ingest": lambda: ours.post("/attention", *upload).whole,
        "bare response": lambda: bare.post(f"/bytes/{BIG}").answer,
        "answer": lambda: ours.post("/attention", *download).answer,
    }
    return list(in_turn(ways, rounds))


def exchanges(size: int) -> dict[str, Tensors]:
    """Return a request of `size` bytes ("in"), and one whose answer has `size` bytes ("out").

    Both compute one row over one key.
    """
    one = np.array([1], np.int64)
    k = np.zeros((1, 1, size // 2 // 256, 64), np.float32)  # v has the other half of the bytes
    q = np.zeros((1, 1, size // 1024, 1), np.float32)  # for each query, o has 256 float32 values
    v = np.ones((1, 1, 1, 256), np.float32)
    return {
        "in": {"q": k[:, :, :1], "kv_lengths": one, "k": k, "v": k},
        "out": {"q": q, "k": q[:, :, :1], "v": v, "q_lengths": one},
    }


def small_calls(ours: Connection, bare: Connection, device: str, rounds: int, calls: int) -> dict[str, float]:
    """Return the median seconds of a call at `SMALL`, of its echo by bare uvicorn, and of the operator without HTTP."""
    t = np.random.default_rng(0).random(SMALL, np.float32)
    message = SAFETENSORS.whole(dict.fromkeys("qkv", t))

    def posts(connection: Connection, path: str) -> list[float]:
        return [connection.post(path, *message).whole for _ in range(calls)]

    with apart(operator, SMALL, device, **engine_variables()) as alone:
        ways = {
            "bare echo": partial(posts, bare, "/echo"),
            "call": partial(posts, ours, "/attention"),
            "bare exchange": partial(posts, bare, f"/bytes/{t.nbytes}"),
            "operator": lambda: alone("calls", calls),
        }
        samples = list(in_turn(ways, rounds))
    return {name: median(taken for each in samples for taken in each[name]) for name in ways}


def operator(shape: tuple[int, ...], device: str = "cpu") -> dict[str, Callable[[int], list[float]]]:
    """Return a function that times calls of the operator as the engine makes them, with copies to and from a GPU."""
    import torch

    from flashpoint_kernels import Options, Problem, available_backends, run

    backend, pinned = available_backends(device)[0], device != "cpu"
    tensors = {name: torch.rand(shape, pin_memory=pinned) for name in "qkv"}
    answer = torch.empty(shape, pin_memory=pinned)

    def call() -> None:
        problem = Problem.create({name: t.to(device, non_blocking=True) for name, t in tensors.items()}, Options())
        run([problem], backend)
        if pinned:
            answer.copy_(problem.outputs["o"])

    call()
    return {"calls": lambda count: [seconds(call) for _ in range(count)]}


def engine_variables() -> dict[str, str]:
    """Return the environment variables that the service gives its engines, so that a child computes like an engine."""
    from flashpoint_server.processes.processes import ENGINE_VARIABLES

    return {name: value for name, value in ENGINE_VARIABLES.items() if name not in os.environ}


def family(child: Child) -> dict[str, psutil.Process]:
    """Return the HTTP process and its engine."""
    http_process = psutil.Process(child.pid)
    (engine,) = http_process.children()
    return {"HTTP": http_process, "engine": engine}


def resident(child: Child) -> dict[str, float]:
    """Return the resident MiB of the HTTP process and of its engine; shared memory counts in both."""
    return {name.lower(): round(each.memory_info().rss / MIB, 1) for name, each in family(child).items()}


def memory(ours: Connection, child: Child, *counts: int) -> list[dict[str, float]]:
    """Return the resident memory after each number of requests in `counts`; the requests have many shapes."""
    messages = []
    for length in (1, 7, 16, 33, 64, 96, 128, 200):
        t = np.ones((1, 4, length, 32), np.float32)
        messages.append(("/attention", *SAFETENSORS.whole(dict.fromkeys("qkv", t), causal=True, return_lse=True)))
        messages.append(("/attention/grad", *SAFETENSORS.whole(dict.fromkeys(("q", "k", "v", "do"), t))))
    sizes = []
    for count in range(counts[-1] + 1):
        if count in counts:
            sizes.append(resident(child))
        ours.post(*messages[count % len(messages)])
    return sizes


@contextlib.contextmanager
def bare_uvicorn() -> Iterator[int]:
    """Run bare uvicorn, an upper bound of a Python service's speed, and yield its port."""
    command = [sys.executable, str(ROOT / "benchmarks/peers/bare_uvicorn.py")]
    with process(command, stdout=subprocess.PIPE) as child:
        yield int(child.stdout.readline())


def measure(args: Args) -> dict[str, Any]:
    starts = []
    for _ in range(args.starts - 1):
        with service(args.device) as (_, _, taken):
            starts.append(taken)
    with bare_uvicorn() as bare_port, service(args.device) as (child, port, taken):
        starts.append(taken)
        with contextlib.closing(Connection(port)) as ours, contextlib.closing(Connection(bare_port)) as bare:
            small = small_calls(ours, bare, args.device, args.rounds, args.calls)
            early, late = memory(ours, child, args.requests // 10, args.requests)
            large = large_bodies(ours, bare, LARGE * args.rounds)
    bound = small["bare echo"] + small["operator"]
    growth = max(late[name] / early[name] for name in early)
    seconds_of = {name: median(each[name] for each in large) for name in large[0]}
    bodies = ("ingest", "bare discard", "answer", "bare response")
    calls = ("call", "bare echo", "bare exchange", "operator")
    return {
        "rounds": args.rounds, "calls": args.calls,
        "targets": [
            target("64 MiB in / bare uvicorn discarding", ratio(large, "bare discard", "ingest"), "rate", least=0.9),
            target("64 MiB out / bare uvicorn's", ratio(large, "bare response", "answer"), "rate", least=0.9),
            target("small call / (bare uvicorn's echo + operator)", small["call"] / bound, "time", most=1.3),
            target("ready after its start", median(starts), "seconds", most=5.0),
            target(f"resident after {args.requests} calls / a tenth of them", growth, "size", most=1.05),
        ],
        "small_call_shape": SMALL,
        "mib_per_second": {name: round(BIG / MIB / seconds_of[name]) for name in bodies},
        "median_microseconds": {name: round(small[name] * 1e6) for name in calls},
        "resident_mib": {"early": early, "late": late},
    }  # fmt: skip


if __name__ == "__main__":
    run(
        measure,
        "serving",
        device=option("cpu", "device of the service and of the operator"),
        rounds=option(15, "rounds of each comparison"),
        calls=option(60, "small calls of each way in a round"),
        starts=option(3, "timed starts of the service"),
        requests=option(10_000, "requests before the last look at memory; the first look is after a tenth"),
    )
