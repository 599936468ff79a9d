"""Time the SDK's transport over a socket beside `http.client` with `readinto`, and beside httpx's own transport.

A peer in a separate process uses sockets only: it reads requests into one buffer and answers from another. Each round
times every way once, in turn. The medians of the rounds, in MiB/s (and microseconds for a call of 4 KiB), go to
benchmarks/results/client-<cpu>.json with device, versions, commit and date. Needs only the SDK.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.client
import json
import multiprocessing
import re
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import httpx
import numpy as np
from runner import Option, run

import flashpoint
from flashpoint_contract import wire

MIB = 1 << 20
SMALL_CALLS = 50


def message(name: str, size: int) -> bytearray:
    """Return a message of one float32 tensor of `size` bytes."""
    return bytearray(wire.build_head([(name, "float32", (1, size // 4))], {})) + bytes(size)


def peer(size: int, ports: Connection) -> None:
    """Answer on two ports: on the first with 4,096 bytes, on the second with `size` bytes."""
    for answer_size in (4096, size):
        body = message("o", answer_size)
        listener = socket.create_server(("127.0.0.1", 0))
        ports.send(listener.getsockname()[1])
        threading.Thread(target=accept, args=(listener, body), daemon=True).start()
    with contextlib.suppress(EOFError):
        ports.recv()


def accept(listener: socket.socket, body: bytearray) -> None:
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0], body), daemon=True).start()


def answer(connection: socket.socket, body: bytearray) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {wire.MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    buffer = memoryview(bytearray(4 * MIB))
    while True:
        start = bytearray()
        while b"\r\n\r\n" not in start:
            if not (data := connection.recv(1 << 16)):
                return
            start += data
        request_head, _, rest = start.partition(b"\r\n\r\n")
        length_field = re.search(rb"(?i)content-length: (\d+)", request_head)
        left = int(length_field[1]) - len(rest) if length_field else 0
        while left:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        connection.sendall(head)
        connection.sendall(body)


@contextlib.contextmanager
def peer_process(size: int) -> Iterator[tuple[str, str]]:
    """Yield the addresses that answer with 4,096 bytes and with `size` bytes."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=peer, args=(size, theirs))
    process.start()
    theirs.close()
    try:
        yield f"127.0.0.1:{ours.recv()}", f"127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join()


Call = Callable[[], Any]
AsyncCall = Callable[[], Awaitable[Any]]


def through_http_client(address: str, body: bytearray, answer_size: int) -> Call:
    connection = http.client.HTTPConnection(address, timeout=60)

    def call() -> Any:
        connection.request("POST", "/attention", body, {"Content-Type": wire.MEDIA_TYPE})
        response = connection.getresponse()
        buffer = np.empty(int(response.headers["Content-Length"]), np.uint8)
        view = buffer.data
        while view:
            view = view[response.readinto(view) :]
        assert len(buffer) > answer_size
        return buffer

    return call


def calls(address: str, q: Any, answer_size: int, stack: contextlib.ExitStack) -> dict[str, Call]:
    """Return every synchronous way of sending `q` to `address`."""
    tiny = np.zeros((1, 4), np.float32)
    ours = stack.enter_context(flashpoint.Client(f"http://{address}"))
    httpxs = stack.enter_context(flashpoint.Client(f"http://{address}", transport=httpx.HTTPTransport()))
    body = message("q", q.nbytes)
    return {
        "http.client": through_http_client(address, body, answer_size),
        "flashpoint": lambda: ours.attention(q, tiny, tiny),
        "httpx": lambda: httpxs.attention(q, tiny, tiny),
    }


def async_calls(address: str, q: Any) -> tuple[dict[str, Any], list[flashpoint.AsyncClient]]:
    """Return every asynchronous way, and the clients to close."""
    tiny = np.zeros((1, 4), np.float32)
    clients = {
        "flashpoint async": flashpoint.AsyncClient(f"http://{address}"),
        "httpx async": flashpoint.AsyncClient(f"http://{address}", transport=httpx.AsyncHTTPTransport()),
    }
    made = {name: functools.partial(client.attention, q, tiny, tiny) for name, client in clients.items()}
    return made, list(clients.values())


def measure(address: str, q: Any, answer_size: int, rounds: int, repeat: int) -> dict[str, float]:
    """Return each way's median seconds per call. A turn makes `repeat` calls; the first round does not count."""
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack, asyncio.Runner() as runner:
        ways = calls(address, q, answer_size, stack)
        async_ways, clients = async_calls(address, q)

        async def repeated(call: AsyncCall) -> None:
            for _ in range(repeat):
                await call()

        for _ in range(rounds + 1):
            for name, call in ways.items():
                start = time.perf_counter()
                for _ in range(repeat):
                    call()
                times.setdefault(name, []).append((time.perf_counter() - start) / repeat)
            for name, async_call in async_ways.items():
                start = time.perf_counter()
                runner.run(repeated(async_call))
                times.setdefault(name, []).append((time.perf_counter() - start) / repeat)
        for client in clients:
            runner.run(client.aclose())
    return {name: statistics.median(samples[1:]) for name, samples in times.items()}


def rates(seconds: dict[str, float], size: int) -> dict[str, dict[str, float]]:
    base = seconds["http.client"]
    return {
        name: {"mib_per_second": round(size / MIB / taken), "of_http_client": round(base / taken, 3)}
        for name, taken in seconds.items()
    }


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    size = args.mib * MIB
    big, small = np.zeros((1, size // 4), np.float32), np.zeros((1, 1024), np.float32)
    with peer_process(size) as (little, much):
        result = {
            "mib": args.mib,
            "rounds": args.rounds,
            "upload": rates(measure(little, big, 4096, args.rounds, 1), size),
            "download": rates(measure(much, small, size, args.rounds, 1), size),
            "small_call_microseconds": {
                name: round(taken * 1e6)
                for name, taken in measure(little, small, 4096, args.rounds, SMALL_CALLS).items()
            },
        }
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    run(run_all, "client", packages=("httpx", "numpy"), malloc=False, mib=Option(64), rounds=Option(15))
