"""The events of a benchmark, over as many connections as it takes. No I/O.

`Client` and `AsyncClient` drive a `Listening` as they do an `Exchange`, attempt after attempt until it has `ended`:

    request → begin → (space → filled → events) … → finish      or      failed → how long to sleep
"""

from __future__ import annotations

import time
from dataclasses import replace

import httpx

from flashpoint._calls import DEFAULT, Call
from flashpoint._http import sse
from flashpoint._http.exchange import Exchange
from flashpoint.benchmark_schema import ENDED, EVENT, BenchmarkEvent, StateEvent
from flashpoint.errors import ConnectionFailedError, DeadlineExceededError, ProtocolError


class Listening(Exchange):
    """The events of job `id` behind number `after`.

    Each attempt has the whole of the timeout. One whose answer had begun is followed by another when its time is over;
    `retries` bounds how often in a row a connection may fail or end without an event.
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
        """Those that have come since they were last asked for."""
        if not isinstance(self._reader, _Events):
            return []
        found = []
        for event in self._reader.take():
            if event.id > self._last:  # a server may say again what it has said
                found.append(event)
                self._last = event.id
                self._failures = 0
                self.ended = isinstance(event, StateEvent) and event.state in ENDED
        return found

    def finish(self) -> None:
        """The answer is over, before the benchmark is. Raises the error that it is, or that it ended too soon."""
        self.answer()
        raise ConnectionFailedError("the events ended before the benchmark did")

    def failed(self, error: Exception) -> float:
        begun = isinstance(self._reader, _Events) and self._status == self.call.success
        if begun and isinstance(error, (httpx.TimeoutException, DeadlineExceededError)):
            return 0.0
        self._deadline = None  # the next attempt has its own
        return super().failed(error)


class _Events:
    """Reads events until there are no more."""

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
        """Nothing is left to say."""
