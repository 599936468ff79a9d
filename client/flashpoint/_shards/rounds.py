"""Run the operations of a `Spread`, a cache over several servers: `Threads` with threads, `Tasks` with asyncio."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

from flashpoint._calls import service
from flashpoint._client.async_client import AsyncClient
from flashpoint._client.client import Client
from flashpoint._client.settings import seconds
from flashpoint._http import forked
from flashpoint._shards.spread import PartCall, Round, Steps
from flashpoint.errors import FlashpointError

MOST_CALLS = 64  # maximum concurrent calls
T = TypeVar("T")


class Deadline:
    """The deadline of an operation. Each of its calls has the time that remains. With the timeout `DEFAULT` there is no
    deadline, and each call has the default timeout of its client.
    """

    def __init__(self, timeout: Any = service.DEFAULT) -> None:
        self._given = timeout is not service.DEFAULT
        given = seconds(timeout) if self._given else None
        self._end = None if given is None else time.monotonic() + given

    def timed(self, ask: PartCall) -> service.Call[Any]:
        if not self._given:
            return ask.call
        left = None if self._end is None else max(self._end - time.monotonic(), 1e-6)
        return replace(ask.call, timeout=left)


class Threads:
    """Runs the operations of a `Spread` with `Client`s, one at a time. The calls of a `Round` run in threads."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients
        self.forked()
        forked.watch(self)

    def forked(self) -> None:
        """Make the thread pool and the lock. A forked process has none of its parent's threads."""
        self._pool = ThreadPoolExecutor(MOST_CALLS, "flashpoint-cache")  # the pool starts threads only when needed
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Threads, (self.clients,)

    def run(self, steps: Steps[T], deadline: Deadline | None = None) -> T:
        for client in self.clients:  # before threads start
            client._ready_to_call()
        deadline = deadline or Deadline()
        with self._lock:
            answers: Any = None
            try:
                while True:
                    answers = self._round(steps.send(answers), deadline)
            except StopIteration as end:
                result: T = end.value
                return result

    def close(self) -> None:
        self._pool.shutdown()

    def _round(self, batch: Round, deadline: Deadline) -> list[Any]:
        if len(batch.asks) == 1 and not batch.whole:
            return [self._one(batch.asks[0], deadline, None)]
        theirs, ours = socket.socketpair()  # when `theirs` becomes readable, the calls of all threads end
        with theirs, ours:
            context = contextvars.copy_context  # passes the caller's trace context to the threads
            calls = [self._pool.submit(context().run, self._one, ask, deadline, theirs) for ask in batch.asks]
            try:
                ended, _ = wait(calls, return_when=FIRST_EXCEPTION) if not batch.whole else wait(calls)
                if not batch.whole:
                    for call in ended:
                        call.result()
                return [_outcome(call) for call in calls]
            finally:
                ours.send(b"\0")
                for call in calls:
                    call.cancel()
                wait(calls)

    def _one(self, ask: PartCall, deadline: Deadline, stop: socket.socket | None) -> Any:
        client = self.clients[ask.server]
        try:
            return client._run(client._exchange(deadline.timed(ask), stop=stop))
        except FlashpointError as error:
            raise _named(error, client.url) from None


class Tasks:
    """Runs the operations of a `Spread` with `AsyncClient`s, one at a time. The calls of a `Round` run in tasks."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self.clients = clients
        self._lock = asyncio.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tasks, (self.clients,)

    async def run(self, steps: Steps[T], deadline: Deadline | None = None) -> T:
        deadline = deadline or Deadline()
        async with self._lock:
            answers: Any = None
            try:
                while True:
                    answers = await self._round(steps.send(answers), deadline)
            except StopIteration as end:
                result: T = end.value
                return result

    async def _round(self, batch: Round, deadline: Deadline) -> list[Any]:
        calls = [asyncio.ensure_future(self._one(ask, deadline)) for ask in batch.asks]
        try:
            results = await asyncio.gather(*calls, return_exceptions=batch.whole)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException) and not isinstance(one, FlashpointError):
                raise one
        return list(results)

    async def _one(self, ask: PartCall, deadline: Deadline) -> Any:
        client = self.clients[ask.server]
        try:
            return await client._run(client._exchange(deadline.timed(ask)))
        except FlashpointError as error:
            raise _named(error, client.url) from None


def _outcome(call: Any) -> Any:
    """Return the result of a call, or its FlashpointError. Raises other errors."""
    try:
        return call.result()
    except FlashpointError as error:
        return error


def _named(error: FlashpointError, url: str) -> FlashpointError:
    """Put the server's URL before the error's text, and return the error."""
    error.detail = f"{url}: {error.detail}"
    error.args = (error.detail,)
    return error
