"""Run kernels in threads that run nothing else.

A kernel that reads a cache replaces everything in the processor caches of its core. Python code that runs there next
takes twice as long: on 2 cores with eight callers, each over a cache of 16 MiB, a token took 250 µs of Python in the
engine; over caches of a few hundred keys, 140 µs. So kernels leave one core free while other requests
run or wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class KernelThreads:
    """`count` threads that run calls in their order. If `count` is 0, the caller's thread runs the calls."""

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
        """Run the next call. This is a separate method so that a waiting thread has no reference to the last call."""
        call, errors, running = self._calls.get()
        try:
            call()
        except BaseException as error:
            errors.append(error)
        running.release()
