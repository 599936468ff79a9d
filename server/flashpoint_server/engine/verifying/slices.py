"""Run a function in a thread of its own, a slice at a time: it stops at each `pause` once the slice's time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Ended(BaseException):  # ends a function that is no longer wanted, without an error
    """Raised by `pause` after `end`."""


class Sliced(Generic[R]):
    """A function that takes `pause`, and its result or its error when it has ended."""

    def __init__(self, work: Callable[[Callable[[], None]], R]) -> None:
        self._work = work
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0.0  # in `time.perf_counter` seconds
        self._unwanted = False
        self.done = False
        self.result: R | None = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="verification", daemon=True).start()

    def step(self, seconds: float) -> None:
        """Run the function until its first `pause` after `seconds`, or to its end. Call this only if not `done`."""
        self._until = time.perf_counter() + seconds
        self._go.release()
        self._paused.acquire()

    def end(self) -> None:
        """End the function at the `pause` where it is."""
        self._unwanted = True
        self._go.release()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._unwanted:
                self.result = self._work(self._pause)
        except Ended:
            pass
        except Exception as error:
            self.error = error
        finally:
            self.done = True
            self._paused.release()

    def _pause(self) -> None:
        if time.perf_counter() >= self._until:
            self._paused.release()
            self._go.acquire()
        if self._unwanted:
            raise Ended
