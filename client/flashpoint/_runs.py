"""A benchmark at a server, as both clients give it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

from flashpoint import _proof
from flashpoint._calls import Call
from flashpoint.benchmark_schema import BenchmarkEvent, BenchmarkJob


class _Client(Protocol):
    def _call(self, call: Call, /) -> Any: ...

    def _listen(self, id: str, after: int, /) -> Iterator[BenchmarkEvent]: ...


class _AsyncClient(Protocol):
    async def _call(self, call: Call, /) -> Any: ...

    def _listen(self, id: str, after: int, /) -> AsyncIterator[BenchmarkEvent]: ...


class BenchmarkRun:
    """The benchmark `id` at the client's server. Every method raises the errors of `flashpoint.errors`."""

    def __init__(self, client: _Client, id: str) -> None:
        self.id = id
        self._client = client

    def job(self) -> BenchmarkJob:
        """As it is now."""
        job: BenchmarkJob = self._client._call(_proof.job("GET", self.id))
        return job

    def events(self, after: int = 0) -> Iterator[BenchmarkEvent]:
        """Its events behind number `after`, those that have been first, until it has ended.

        A connection that breaks is made again where the events had come to, as often in a row as the client retries.
        """
        return self._client._listen(self.id, after)

    def wait(self) -> BenchmarkJob:
        """The job once it has ended, whichever way: see its `state`."""
        for _ in self.events():
            pass
        return self.job()

    def cancel(self) -> BenchmarkJob:
        """Stop it; a benchmark that has ended stays as it is."""
        job: BenchmarkJob = self._client._call(_proof.job("DELETE", self.id))
        return job


class AsyncBenchmarkRun:
    """The asyncio twin of `BenchmarkRun`."""

    def __init__(self, client: _AsyncClient, id: str) -> None:
        self.id = id
        self._client = client

    async def job(self) -> BenchmarkJob:
        """See `BenchmarkRun.job`."""
        job: BenchmarkJob = await self._client._call(_proof.job("GET", self.id))
        return job

    def events(self, after: int = 0) -> AsyncIterator[BenchmarkEvent]:
        """See `BenchmarkRun.events`."""
        return self._client._listen(self.id, after)

    async def wait(self) -> BenchmarkJob:
        """See `BenchmarkRun.wait`."""
        async for _ in self.events():
            pass
        return await self.job()

    async def cancel(self) -> BenchmarkJob:
        """See `BenchmarkRun.cancel`."""
        job: BenchmarkJob = await self._client._call(_proof.job("DELETE", self.id))
        return job
