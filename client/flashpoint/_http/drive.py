"""Run the generators of connection.py until a deadline: blocking in a thread, or in an asyncio event loop."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Generator
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import httpx

T = TypeVar("T")

# poll() needs no file descriptor of its own, and accepts descriptors of any number.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
_LATE = "the deadline passed"


class Wait(NamedTuple):
    """A wait for one of `events` (EVENT_READ, EVENT_WRITE) on descriptor `fd`. `yield` returns the event."""

    fd: int
    events: int


class Several(NamedTuple):
    """A wait for the first of `waits`, at most `seconds`. `yield` returns that `Wait`, or None after the timeout."""

    waits: tuple[Wait, ...]
    seconds: float | None


Pending: TypeAlias = Wait | Several
Steps: TypeAlias = Generator[Pending, Any, T]


def _each(pending: Pending | None) -> tuple[Wait, ...]:
    return () if pending is None else (pending,) if isinstance(pending, Wait) else pending.waits


def readable(wait: Wait) -> bool:
    """Return whether the event of `wait` has already occurred."""
    with _Selector() as selector:
        selector.register(*wait)
        return bool(selector.select(0))


def run(
    steps: Steps[T], deadline: float | None, late: type[httpx.TimeoutException], stop: socket.socket | None = None
) -> T:
    """Return the result of `steps`. Raises `late` at `deadline` (`time.monotonic`), ReadError if `stop` is readable."""
    try:
        with _Selector() as selector:
            if stop is not None:
                selector.register(stop, EVENT_READ)
            watched: Pending | None = None
            wait = next(steps)
            while True:
                if wait != watched:
                    for each in _each(watched):
                        selector.unregister(each.fd)
                    for each in _each(wait):
                        selector.register(*each)
                    watched = wait
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise late(_LATE)
                pause = None if isinstance(wait, Wait) else wait.seconds
                pauses = pause is not None and (left is None or pause < left)
                if not (ready := selector.select(pause if pauses else left)):
                    if not pauses:
                        raise late(_LATE)
                    wait = steps.send(None)
                    continue
                if stop is not None and any(key.fileobj is stop for key, _ in ready):
                    raise httpx.ReadError("the call was stopped")
                key, events = ready[0]
                wait = steps.send(events if isinstance(wait, Wait) else Wait(key.fd, events))
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
        self._watched: Pending | None = None
        self._pause: asyncio.TimerHandle | None = None
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

    def _watch(self, pending: Pending | None) -> None:
        if isinstance(pending, Wait) and pending == self._watched:
            return
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for wait in _each(self._watched):
            self._loop.remove_reader(wait.fd)
            self._loop.remove_writer(wait.fd)
        single = isinstance(pending, Wait)
        for wait in _each(pending):
            if wait.events & EVENT_READ:
                self._loop.add_reader(wait.fd, self._step, EVENT_READ if single else Wait(wait.fd, EVENT_READ))
            if wait.events & EVENT_WRITE:
                self._loop.add_writer(wait.fd, self._step, EVENT_WRITE if single else Wait(wait.fd, EVENT_WRITE))
        if isinstance(pending, Several) and pending.seconds is not None:
            self._pause = self._loop.call_later(pending.seconds, self._step, None)
        self._watched = pending
