"""Run kernels in threads that run nothing else, one fewer than cores, so that one core runs only Python code.

A kernel that reads a large KV cache evicts everything else from the processor caches of its core. Python code that runs
there next takes about twice as long: on 2 cores with eight callers, the engine's Python code took 250 µs for a token
with KV caches of 16 MiB, and 140 µs with KV caches of a few hundred keys. So kernels run in these threads while other
requests run or wait.
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
        """Run the next call. A separate method, because variables of the loop would keep an ended call alive."""
        call, errors, running = self._calls.get()
        try:
            call()
        except BaseException as error:
            errors.append(error)
        running.release()
