"""Send HTTP/1.1 load from one thread with little processor time, so that two cores remain for the measured program.

Requests are built in advance, and sent without a copy. The operating system discards the bodies of answers, which takes
half the time of reading them (0.21 ms against 0.44 ms for a MiB over loopback).
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from forms import Request

_SCRATCH = memoryview(bytearray(256 * 1024))  # buffer size for an answer's head and the start of its body
PATIENCE = 120.0  # timeout in seconds without any progress


class Timed(NamedTuple):
    """The time when a request was due or sent, and when its whole answer had come, in seconds since the load began."""

    began: float
    ended: float

    @property
    def latency(self) -> float:
        return self.ended - self.began


class _Connection(socket.socket):
    def __init__(self, port: int) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.connect(("127.0.0.1", port))
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.setblocking(False)
        self.request = -1  # index of the request that this connection sends

    def start(self, number: int, request: Request) -> None:
        self.request = number
        self.unsent = [memoryview(piece).cast("B") for piece in request]
        self._head = b""
        self._left = -1  # length of the answer's body in bytes, known after the head
        self.send_rest()

    def send_rest(self) -> None:
        """Send as much of the request as the socket's buffer takes."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                sent = self.sendmsg(self.unsent)
                while self.unsent and sent >= len(self.unsent[0]):
                    sent -= len(self.unsent.pop(0))
                if sent:
                    self.unsent[0] = self.unsent[0][sent:]

    def receive(self) -> bool:
        """Receive the available bytes, and return whether the answer is complete."""
        while self._left:
            try:
                # With MSG_TRUNC, TCP discards up to `rest` bytes and does not write to the buffer (man 7 tcp).
                rest = min(self._left, len(_SCRATCH)) if self._left > 0 else 0
                size = self.recv_into(_SCRATCH, rest, socket.MSG_TRUNC if rest else 0)
            except BlockingIOError:
                return False
            if not size:
                raise ConnectionError(f"the peer hung up after {self._head!r}")
            if self._left > 0:
                self._left -= size
                continue
            self._head += _SCRATCH[:size]
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                continue
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(self._head.decode(errors="replace"))
            headers = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
            self._left = int(headers[b"content-length"]) - len(body)
        return True


def drive(port: int, requests: Sequence[Request], connections: int, due: Sequence[float] | None = None) -> list[Timed]:
    """Send `requests` in order over up to `connections` connections, and return the times of each.

    Without `due` this is a closed loop: each answer starts the next request. With `due` it is an open loop: request i
    is due `due[i]` seconds after the start, and its latency counts from that time, even if it is sent later.
    """
    timed = [Timed(0.0, 0.0)] * len(requests)
    waiting = deque(range(len(requests)))
    free = [_Connection(port) for _ in range(min(connections, len(requests)))]
    busy: list[_Connection] = []
    began = time.perf_counter()
    try:
        while waiting or busy:
            now = time.perf_counter() - began
            while waiting and free and (due is None or due[waiting[0]] <= now):
                number = waiting.popleft()
                timed[number] = Timed(now if due is None else due[number], 0.0)
                connection = free.pop()
                busy.append(connection)
                connection.start(number, requests[number])
            rest = due[waiting[0]] - now if due is not None and waiting and free else PATIENCE
            # select, not epoll, whose timeouts are whole milliseconds.
            readable, writable, _ = select.select(busy, [c for c in busy if c.unsent], [], max(rest, 0.0))
            if not readable and not writable and rest == PATIENCE:
                raise TimeoutError(f"no progress for {PATIENCE} s")
            for connection in writable:
                connection.send_rest()
            for connection in readable:
                if connection.receive():
                    number = connection.request
                    timed[number] = Timed(timed[number].began, time.perf_counter() - began)
                    busy.remove(connection)
                    free.append(connection)
    finally:
        for connection in (*busy, *free):
            connection.close()
    return timed


def repeated(port: int, requests: Sequence[Request], calls: int) -> float:
    """Return the requests per second of all callers together; each sends its small request `calls` times in a row."""
    callers = {connection.fileno(): connection for connection in (_Connection(port) for _ in requests)}
    request_of = dict(zip(callers, requests, strict=True))
    left = dict.fromkeys(callers, calls)
    with select.epoll() as waiting:
        began = time.perf_counter()
        for number, connection in callers.items():
            waiting.register(number, select.EPOLLIN)
            connection.start(0, request_of[number])
        while any(left.values()):
            if not (ready := waiting.poll(PATIENCE)):
                raise TimeoutError(f"no progress for {PATIENCE} s")
            for number, _ in ready:
                if callers[number].receive():
                    left[number] -= 1
                    if left[number]:
                        callers[number].start(0, request_of[number])
        ended = time.perf_counter()
    for connection in callers.values():
        connection.close()
    return len(requests) * calls / (ended - began)


def rate(timed: Sequence[Timed]) -> float:
    """Return the requests per second of a closed loop, from its start to the last answer."""
    return len(timed) / max(each.ended for each in timed)
