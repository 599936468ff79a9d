"""`BenchmarkRun` and `AsyncBenchmarkRun`: a benchmark that runs on a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from flashpoint._calls import verification
from flashpoint._calls.results import BenchmarkJob
from flashpoint._calls.service import AsyncCallSender, CallSender, asynchronous
from flashpoint_contract.schemas.benchmark import BenchmarkEvent
from flashpoint_contract.wording.docstrings import twin_of


class _Client(CallSender, Protocol):
    def _listen(self, id: str, after: int, /) -> Iterator[BenchmarkEvent]: ...


class _AsyncClient(AsyncCallSender, Protocol):
    def _listen(self, id: str, after: int, /) -> AsyncIterator[BenchmarkEvent]: ...


class BenchmarkRun:
    """A benchmark on the client's server, by its `id`. Every method raises the errors of `flashpoint.errors`."""

    def __init__(self, client: _Client, id: str) -> None:
        self.id = id
        self._client = client

    def job(self) -> BenchmarkJob:
        """Return the benchmark as it is now, with the rows that are finished."""
        return self._client._call(verification.job("GET", self.id))

    def events(self, after: int = 0) -> Iterator[BenchmarkEvent]:
        """Yield the events of the benchmark until it has ended, beginning with those that have already happened.

        Only events later than `after`, the number of an event (`BenchmarkEvent.id`), are yielded. If the connection
        breaks, the client connects again, and continues after the last event. The client's `retries` limits the
        failures in a row.
        """
        return self._client._listen(self.id, after)

    def wait(self) -> BenchmarkJob:
        """Wait until the benchmark has ended, and return it. Its `state` is `done`, `failed` or `cancelled`."""
        for _ in self.events():
            pass
        return self.job()

    def cancel(self) -> BenchmarkJob:
        """Stop it, and return it. A benchmark that has ended stays as it is."""
        return self._client._call(verification.job("DELETE", self.id))


@twin_of(BenchmarkRun)
class AsyncBenchmarkRun:
    """The asyncio twin of `BenchmarkRun`: the same methods, awaited."""

    def __init__(self, client: _AsyncClient, id: str) -> None:
        self.id = id
        self._client = client

    job = asynchronous(BenchmarkRun.job)
    """Return the benchmark as it is now, with the rows that are finished."""

    def events(self, after: int = 0) -> AsyncIterator[BenchmarkEvent]:
        """Yield the events of the benchmark until it has ended, beginning with those that have already happened."""
        return self._client._listen(self.id, after)

    async def wait(self) -> BenchmarkJob:
        """Wait until the benchmark has ended, and return it. Its `state` is `done`, `failed` or `cancelled`."""
        async for _ in self.events():
            pass
        return await self.job()

    cancel = asynchronous(BenchmarkRun.cancel)
    """Stop it, and return it. A benchmark that has ended stays as it is."""
