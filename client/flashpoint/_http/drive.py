"""Run the steps of a connection until a deadline: blocking in a thread, or in an asyncio event loop."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, Generic

import httpx

from flashpoint._http.connection import Steps, T, Wait

# poll() needs no file descriptor of its own, and accepts descriptors of any number.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
_LATE = "the deadline passed"


def readable(wait: Wait) -> bool:
    """Return whether the event of `wait` has already occurred."""
    with _Selector() as selector:
        selector.register(*wait)
        return bool(selector.select(0))


def run(
    steps: Steps[T], deadline: float | None, late: type[httpx.TimeoutException], stop: socket.socket | None = None
) -> T:
    """Return the result of `steps`. Raise `late` at `deadline`, a time of `time.monotonic`.

    Another thread can end the exchange: it makes `stop` readable, and this function raises ReadError.
    """
    try:
        with _Selector() as selector:
            if stop is not None:
                selector.register(stop, EVENT_READ)
            watched = wait = next(steps)
            selector.register(*wait)
            while True:
                if wait != watched:
                    selector.unregister(watched.fd)
                    selector.register(*wait)
                    watched = wait
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not (ready := selector.select(left)):
                    raise late(_LATE)
                if stop is not None and any(key.fileobj is stop for key, _ in ready):
                    raise httpx.ReadError("the call was stopped")
                wait = steps.send(ready[0][1])
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        steps.close()


async def run_async(steps: Steps[T], deadline: float | None, late: type[httpx.TimeoutException]) -> T:
    """Do the same as `run` in the running event loop, which must have `add_reader`."""
    return await _Task(steps, deadline, late).result()


class _Task(Generic[T]):
    """Runs steps in callbacks of the event loop. The awaiting task wakes only once, when the steps have ended."""

    def __init__(self, steps: Steps[T], deadline: float | None, late: type[httpx.TimeoutException]) -> None:
        self._steps = steps
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[T] = self._loop.create_future()
        self._watched: Wait | None = None
        self._deadline = deadline
        self._late = late

    async def result(self) -> T:
        timer: asyncio.TimerHandle | None = None
        try:
            if self._deadline is not None:
                timer = self._loop.call_later(self._deadline - time.monotonic(), self._expire)
            self._step(None)
            return await self._done
        finally:
            self._watch(None)
            if timer is not None:
                timer.cancel()
            self._steps.close()

    def _expire(self) -> None:
        if not self._done.done():
            self._done.set_exception(self._late(_LATE))

    def _step(self, ready: Any) -> None:
        if self._done.done():
            return
        try:
            self._watch(self._steps.send(ready))
        except StopIteration as end:
            self._watch(None)
            self._done.set_result(end.value)
        except Exception as error:
            self._watch(None)
            self._done.set_exception(error)

    def _watch(self, wait: Wait | None) -> None:
        if wait == self._watched:
            return
        if self._watched is not None:
            self._loop.remove_reader(self._watched.fd)
            self._loop.remove_writer(self._watched.fd)
        if wait is not None and wait.events & EVENT_READ:
            self._loop.add_reader(wait.fd, self._step, EVENT_READ)
        if wait is not None and wait.events & EVENT_WRITE:
            self._loop.add_writer(wait.fd, self._step, EVENT_WRITE)
        self._watched = wait
