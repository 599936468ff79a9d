"""Receive the events of a benchmark, over several connections if one breaks. No I/O.

`Client` and `AsyncClient` drive a `Listening` like an `Exchange`. They repeat attempts until it has `ended`:

    request → begin → (space → filled → events) … → finish      or      failed → how long to sleep
"""

from __future__ import annotations

import time
from dataclasses import replace

import httpx

from flashpoint._calls.service import DEFAULT, Call
from flashpoint._http.exchange import Exchange
from flashpoint.errors import ConnectionFailedError, DeadlineExceededError, ProtocolError
from flashpoint_contract import sse
from flashpoint_contract.schemas.benchmark import ENDED, EVENT, BenchmarkEvent, StateEvent


class Listening(Exchange):
    """The events of job `id` with numbers above `after`.

    Each attempt has the full timeout. An attempt that times out after its answer began is followed by another.
    `retries` is the largest number of connections in a row that fail or end without an event.
    """

    def __init__(self, id: str, after: int, *, timeout: float | None, retries: int) -> None:
        headers = {"Accept": sse.MEDIA_TYPE}
        call = Call("GET", f"/benchmark/{id}/events", sse.MEDIA_TYPE, headers, (), DEFAULT, lambda _: None)
        super().__init__(call, timeout=timeout, retries=retries)
        self._timeout = timeout
        self._last = after
        self.ended = False

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        self._status = 0
        self.call = replace(self.call, headers={**self.call.headers, "Last-Event-ID": str(self._last)})
        return super().request(http)

    def begin(self, response: httpx.Response) -> None:
        super().begin(response)
        if self._status == self.call.success:
            self._reader = _Events()

    def events(self) -> list[BenchmarkEvent]:
        """Return the events that have arrived since the last call."""
        if not isinstance(self._reader, _Events):
            return []
        found = []
        for event in self._reader.take():
            if event.id > self._last:  # a server may repeat events
                found.append(event)
                self._last = event.id
                self._failures = 0
                self.ended = isinstance(event, StateEvent) and event.state in ENDED
        return found

    def finish(self) -> None:
        """Raise the server's error, or ConnectionFailedError: the answer ended before the benchmark did."""
        self.answer()
        raise ConnectionFailedError("the events ended before the benchmark did")

    def failed(self, error: Exception) -> float:
        begun = isinstance(self._reader, _Events) and self._status == self.call.success
        if begun and isinstance(error, (httpx.TimeoutException, DeadlineExceededError)):
            return 0.0
        self._deadline = None  # the next attempt has its own
        return super().failed(error)


class _Events:
    """Reads the events of a stream. Implements `Reader`."""

    def __init__(self) -> None:
        self._space = memoryview(bytearray(16 * 1024))
        self._frames = sse.Frames()
        self._events: list[BenchmarkEvent] = []

    def space(self) -> memoryview:
        return self._space

    def filled(self, count: int) -> None:
        try:
            for data in self._frames.feed(bytes(self._space[:count])):
                self._events.append(EVENT.validate_json(data))
        except ValueError as error:
            raise ProtocolError(f"an event that cannot be read: {error}") from error

    def take(self) -> list[BenchmarkEvent]:
        taken, self._events = self._events, []
        return taken

    def finish(self) -> None:
        """Do nothing: `take` returns the events."""
