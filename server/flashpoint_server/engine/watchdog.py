"""Ends a process whose work hangs: the kernel does it, for a thread that hangs may hold Python's lock for ever."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """SIGALRM, which nobody handles, ends the process when any `watched` block takes longer than `limit` seconds."""

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
