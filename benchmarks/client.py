"""Time the SDK's transport over a socket beside `http.client` with `readinto`, and beside httpx's own transport.

A peer in a separate process uses sockets only: it reads requests into one buffer and answers from another. Each round
times each of these transports once. The medians of the rounds, in MiB/s (and microseconds for a call of 4 KiB), go to
benchmarks/results/client-<cpu>.json with device, versions, commit and date. Needs only the SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from forms import SAFETENSORS
from runner import Args, Option, apart, in_turn, medians, run, seconds

import flashpoint
from flashpoint_contract import wire

MIB = 1 << 20
LITTLE = 4096  # bytes of a small body
SMALL_CALLS = 50
Call = Callable[[], Any]


def peer(size: int) -> dict[str, Callable[[], list[int]]]:
    """Listen on two ports: the first answers with `LITTLE` bytes, the second with `size` bytes."""
    ports = []
    for answer_size in (LITTLE, size):
        body = SAFETENSORS.whole({"o": np.zeros((1, answer_size // 4), np.float32)})[1]
        listener = socket.create_server(("127.0.0.1", 0))
        ports.append(listener.getsockname()[1])
        threading.Thread(target=accept, args=(listener, body), daemon=True).start()
    return {"ports": lambda: ports}


def accept(listener: socket.socket, body: bytes) -> None:
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0], body), daemon=True).start()


def answer(connection: socket.socket, body: bytes) -> None:
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


def through_http_client(address: str, q: Any, answer_size: int) -> Call:
    connection = http.client.HTTPConnection(address, timeout=60)
    headers, body = SAFETENSORS.whole({"q": q})

    def call() -> Any:
        connection.request("POST", "/attention", body, headers)
        response = connection.getresponse()
        buffer = np.empty(int(response.headers["Content-Length"]), np.uint8)
        view = buffer.data
        while view:
            view = view[response.readinto(view) :]
        assert len(buffer) > answer_size
        return buffer

    return call


def measured(address: str, q: Any, answer_size: int, rounds: int, repeat: int) -> dict[str, float]:
    """Return the median seconds of a call with `q` in each way. A turn makes `repeat` calls."""
    tiny = np.zeros((1, 4), np.float32)
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        ways = {"http.client": through_http_client(address, q, answer_size)}
        transports = {"flashpoint": None, "httpx": httpx.HTTPTransport()}
        for name, transport in transports.items():
            client = stack.enter_context(flashpoint.Client(f"http://{address}", transport=transport))
            ways[name] = functools.partial(client.attention, q, tiny, tiny)

        def repeated(call: Call) -> None:
            for _ in range(repeat):
                call()

        async def awaited(client: flashpoint.AsyncClient) -> None:
            for _ in range(repeat):
                await client.attention(q, tiny, tiny)

        turns = {name: functools.partial(repeated, call) for name, call in ways.items()}
        async_transports = {"flashpoint async": None, "httpx async": httpx.AsyncHTTPTransport()}
        for name, async_transport in async_transports.items():
            async_client = flashpoint.AsyncClient(f"http://{address}", transport=async_transport)
            stack.callback(lambda each=async_client: runner.run(each.aclose()))
            turns[name] = lambda each=async_client: runner.run(awaited(each))
        timed = {name: lambda turn=turn: seconds(turn) / repeat for name, turn in turns.items()}
        return medians(list(in_turn(timed, rounds)), digits=9)


def rates(taken: dict[str, float], size: int) -> dict[str, dict[str, float]]:
    base = taken["http.client"]
    return {
        name: {"mib_per_second": round(size / MIB / each), "of_http_client": round(base / each, 3)}
        for name, each in taken.items()
    }


def measure(args: Args) -> dict[str, Any]:
    size = args.mib * MIB
    big, small = np.zeros((1, size // 4), np.float32), np.zeros((1, LITTLE // 4), np.float32)
    with apart(peer, size) as ask:
        little, much = (f"127.0.0.1:{port}" for port in ask("ports"))
        calls = measured(little, small, LITTLE, args.rounds, SMALL_CALLS)
        result = {
            "mib": args.mib,
            "rounds": args.rounds,
            "upload": rates(measured(little, big, LITTLE, args.rounds, 1), size),
            "download": rates(measured(much, small, size, args.rounds, 1), size),
            "small_call_microseconds": {name: round(taken * 1e6) for name, taken in calls.items()},
        }
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    run(measure, "client", packages=("httpx", "numpy"), malloc=False, mib=Option(64), rounds=Option(15))
