"""Receive the events of a benchmark, and connect again if a connection breaks. This module does no I/O.

The caller sends `request()`, passes the head of the answer to `begin`, and then repeats `space`, `filled` and `events`
until the benchmark has ended. It calls `finish` if the answer ends before. After an error, `failed` returns the seconds
to sleep before the next `request()`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import httpx

from flashpoint._calls.service import DEFAULT, Call
from flashpoint._calls.verification import Events
from flashpoint._http.exchange import Exchange
from flashpoint.errors import ConnectionFailedError, DeadlineExceededError
from flashpoint_contract import sse
from flashpoint_contract.schemas.benchmark import ENDED, EVENT, BenchmarkEvent, StateEvent


class Listening(Exchange):
    """The state of receiving the events of job `id` with numbers above `after`. Each attempt has the full timeout.

    `retries` is the largest number of connections in a row that fail or end without an event.
    """

    def __init__(self, id: str, after: int, *, timeout: float | None, retries: int) -> None:
        headers = {"Accept": sse.MEDIA_TYPE}
        reader = partial(Events, EVENT, self._take)
        call: Call[None] = Call(
            "GET", f"/benchmark/{id}/events", sse.MEDIA_TYPE, headers, (), DEFAULT, lambda _: None, reader=reader
        )
        super().__init__(call, timeout=timeout, retries=retries)
        self._timeout = timeout
        self._last = after
        self._new: list[BenchmarkEvent] = []
        self.ended = False

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        self._status = 0
        self.call = replace(self.call, headers={**self.call.headers, "Last-Event-ID": str(self._last)})
        return super().request(http)

    def _take(self, event: BenchmarkEvent) -> None:
        if event.id > self._last:  # a server may repeat events
            self._new.append(event)
            self._last = event.id
            self._failures = 0
            self.ended = isinstance(event, StateEvent) and event.state in ENDED

    def events(self) -> list[BenchmarkEvent]:
        """Return the events that have arrived since the previous call of `events`."""
        events, self._new = self._new, []
        return events

    def finish(self) -> None:
        """Raise the server's error, or ConnectionFailedError if the answer ended before the benchmark."""
        self.answer()
        raise ConnectionFailedError("the events ended before the benchmark did")

    def failed(self, error: Exception) -> float:
        if self._status == self.call.success and isinstance(error, (httpx.TimeoutException, DeadlineExceededError)):
            return 0.0
        self._deadline = None  # the next attempt sets its own deadline
        return super().failed(error)
