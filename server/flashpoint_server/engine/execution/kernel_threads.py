"""Threads that run only kernels.

A kernel that reads a cache replaces everything in the processor caches of its core. Python code that runs there next
takes twice as long: on 2 cores with eight callers, each over a cache of 16 MiB, a token took 250 µs of Python in the
engine; over caches of a few hundred keys, 140 µs. So kernels run on one core less than there are, while other requests
run or wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class KernelThreads:
    """`count` threads that run calls in their order. With none, the caller's thread runs them."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], list[BaseException], threading.Lock]] = SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._serve, name=f"kernels {number}", daemon=True).start()

    def run(self, call: Callable[[], None]) -> None:
        """Run a call, and wait for its end. Raises its error."""
        if not self._count:
            call()
            return
        errors: list[BaseException] = []
        running = threading.Lock()
        running.acquire()
        self._calls.put((call, errors, running))
        running.acquire()
        if errors:
            raise errors[0]

    def _serve(self) -> None:
        while True:
            self._run_next()

    def _run_next(self) -> None:
        """Run the next call. It is a method of its own, so that a thread that waits keeps no call alive."""
        call, errors, running = self._calls.get()
        try:
            call()
        except BaseException as error:
            errors.append(error)
        running.release()
