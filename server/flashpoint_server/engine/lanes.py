"""Threads that share one queue: each takes turns to listen, and the one that has found work runs it.

    waiting for its turn → listening → running → (more work) → running …  → waiting for its turn

Nothing is handed from one thread to another: the thread that read a request runs it, which spares the small ones a
wake-up. A thread that has found work that takes a while, or leaves work behind, first passes the turn on.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog

from flashpoint_server.observability.lines import LINES

log = structlog.stdlib.get_logger("flashpoint.engine")


class Work(NamedTuple):
    """`run` it; `brief` says that nobody need listen meanwhile."""

    run: Callable[[], None]
    brief: bool


class Waker:
    """A socket that wakes the listening thread: when another thread calls `wake`, or the process gets a SIGTERM."""

    def __init__(self) -> None:
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)  # its number comes by the socket, to the thread that listens

    def fileno(self) -> int:
        return self._woken.fileno()

    def wake(self) -> None:
        self._waker.send(b"\0")

    def ends(self) -> bool:
        """Return whether a SIGTERM has come since the last call, once the socket is readable."""
        return signal.SIGTERM in self._woken.recv(4096)


class Lanes:
    """`count` threads, the caller's among them.

    `listen` waits for work, and returns None at the end; `hear` takes in what has come; `more` returns work without
    waiting for it. One thread at a time listens or hears.
    """

    def __init__(
        self,
        count: int,
        listen: Callable[[], Work | None],
        hear: Callable[[], None],
        more: Callable[[], Work | None],
    ) -> None:
        self._listen = listen
        self._hear = hear
        self._more = more
        self._turn = threading.Lock()
        self._others = [threading.Thread(target=self._lane, name=f"lane {n}", daemon=True) for n in range(1, count)]

    def run(self) -> None:
        """Until `listen` returns None to each of the threads."""
        for other in self._others:
            other.start()
        self._lane()
        for other in self._others:
            other.join()

    def _lane(self) -> None:
        try:
            self._work()
        except BaseException:  # a bug of ours: a process with one thread less would not be noticed, one that ends is
            log.critical("lane failed", exc_info=True)
            LINES.flush()
            os._exit(1)

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work.run()
            while (more := self._next_at_once()) is not None:
                more.run()

    def _next_at_once(self) -> Work | None:
        """More work, chosen among all that has come: where every thread is at work, nobody else listens."""
        if self._turn.acquire(blocking=False):
            try:
                self._hear()
            finally:
                self._turn.release()
        return self._more()

    def _next(self) -> Work | None:
        with self._turn:
            while (work := self._listen()) is not None and work.brief:
                work.run()
            return work


class Watchdog:
    """SIGALRM, which nobody handles, ends the process when any `watched` block takes longer than `limit` seconds.

    The kernel sends it: a thread that hangs may hold Python's lock for ever.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._began: dict[object, float] = {}  # in order: the first is the oldest

    @contextmanager
    def watched(self) -> Iterator[None]:
        block = object()
        with self._lock:
            self._began[block] = time.monotonic()
            if len(self._began) == 1:
                signal.setitimer(signal.ITIMER_REAL, self._limit)
        try:
            yield
        finally:
            with self._lock:
                del self._began[block]
                oldest = next(iter(self._began.values()), None)
                left = 0.0 if oldest is None else max(oldest + self._limit - time.monotonic(), 1e-6)
                signal.setitimer(signal.ITIMER_REAL, left)
