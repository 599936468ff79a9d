"""`AsyncClient`: the methods of `Client`, for asyncio."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Self, Unpack

import httpx

from flashpoint._calls import caches as cache_calls
from flashpoint._calls import service, verification
from flashpoint._calls.keywords import Benchmark, CacheSizes
from flashpoint._calls.service import Call, R, asynchronous
from flashpoint._client.attending import AsyncAttending
from flashpoint._client.caches import AsyncCache
from flashpoint._client.client import Client
from flashpoint._client.runs import AsyncBenchmarkRun
from flashpoint._client.settings import FAILURES, NOT_THERE, RETRIES, TIMEOUT, ClientSettings
from flashpoint._http.exchange import Exchange
from flashpoint._http.transport import ASYNC, AsyncTransport
from flashpoint.errors import CacheError
from flashpoint_contract.schemas.benchmark import BenchmarkEvent
from flashpoint_contract.wording.docstrings import twin_of


@twin_of(Client)
class AsyncClient(AsyncAttending, ClientSettings[httpx.AsyncClient]):
    """The asyncio twin of `Client`: the same methods, awaited. Use one client in one event loop only.

        async with flashpoint.AsyncClient("http://localhost:8000") as client:
            o = await client.attention(q, k, v, causal=True)

    Every method raises the errors of `flashpoint.errors`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = TIMEOUT,
        retries: int = RETRIES,
        tls: ssl.SSLContext | None = None,
        replica: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Make a client. Nothing is sent yet."""
        super().__init__(url, api_key, timeout, retries, tls, replica, transport)

    def _connect(self) -> None:
        self._own = self._direct(AsyncTransport) if self._transport is None and ASYNC else None
        self._http = httpx.AsyncClient(transport=self._own or self._transport, **self._http_settings())

    delete_saved = asynchronous(Client.delete_saved)
    """Free a forward: `saved` is the result of `attention` with `save=True`, or its id. It may be gone already."""

    async def cache(self, **shape: Unpack[CacheSizes]) -> AsyncCache:
        """Make a KV cache on the server, which holds the keys and values of one sequence."""
        return AsyncCache(self, (await self._call(cache_calls.create(shape)))[0])

    async def caches(self, count: int, **shape: Unpack[CacheSizes]) -> list[AsyncCache]:
        """Make `count` empty caches of one shape on one engine, so that one call can use all of them."""
        return [AsyncCache(self, one) for one in await self._call(cache_calls.create(shape, count))]

    async def fork_caches(
        self, caches: Sequence[AsyncCache], lengths: Sequence[int] | None = None, free: Sequence[AsyncCache] = ()
    ) -> list[AsyncCache]:
        """Copy caches, and delete others: all at once, or nothing. Copies share memory until they are written."""
        return [AsyncCache(self, one) for one in await self._call(cache_calls.fork(caches, lengths, free))]

    async def list_caches(self) -> list[AsyncCache]:
        """Return all caches of this API key on the server, in the order of their creation."""
        page = await self._call(cache_calls.listed(None))
        found = page.caches
        while page.after is not None:
            page = await self._call(cache_calls.listed(page.after))
            found += page.caches
        return [AsyncCache(self, one) for one in found]

    async def delete_caches(self, caches: Sequence[AsyncCache]) -> None:
        """Free the memory of several `caches` in one call. Caches that are gone already are ignored."""
        try:
            await self._call(cache_calls.delete_many(caches))
        except CacheError:
            for cache in caches:
                await cache.delete()

    verify = asynchronous(Client.verify)
    """Compare a backend's answers, or your own, with float64, and judge whether they are near enough."""

    async def benchmark(self, **keywords: Unpack[Benchmark]) -> AsyncBenchmarkRun:
        """Start a benchmark of a grid of cases, or of a preset, on the server's device. Return it without waiting."""
        return AsyncBenchmarkRun(self, (await self._call(verification.submit(keywords))).id)

    def benchmark_run(self, id: str) -> AsyncBenchmarkRun:
        """Return the benchmark with this `id`, which was started before. Nothing is sent yet."""
        return AsyncBenchmarkRun(self, id)

    info = asynchronous(Client.info)
    """Return the server's versions, device, backends with their features, limits, and what it holds."""

    ready = asynchronous(Client.ready)
    """Return whether the server takes work now. False also if no server answers."""

    live = asynchronous(Client.live)
    """Return whether the server's process runs. False also if no server answers."""

    async def aclose(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _health(self, path: str) -> bool:
        try:
            await self._run(self._exchange(service.lookup(path), once=True))
        except NOT_THERE:
            return False
        return True

    async def _call(self, call: Call[R]) -> R:
        result: R = await self._run(self._exchange(call))
        return result

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request: by our own transport with the cookies of httpx's client, or else by httpx's client."""
        if self._own is None or self._http.is_closed:
            self._check_process()
            return await self._http.send(request, stream=True)
        return self._with_cookies(await self._own.handle_async_request(request), request)

    async def _received(self, exchange: Exchange) -> AsyncGenerator[None]:
        response = await self._send(exchange.request(self._http))
        try:
            exchange.begin(response)
            if read_into := response.extensions.get("read_into"):
                while count := await read_into(space := exchange.space(), exchange.minimum(space)):
                    exchange.filled(count)
                    yield
            else:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for chunk in response.stream:
                    exchange.feed(chunk)
                    yield
        finally:
            await response.aclose()

    async def _run(self, exchange: Exchange) -> Any:
        while True:
            try:
                async for _ in self._received(exchange):
                    pass
                return exchange.answer()
            except FAILURES as error:
                delay = exchange.failed(error)
            await asyncio.sleep(delay)

    async def _listen(self, id: str, after: int) -> AsyncIterator[BenchmarkEvent]:
        listening = self._listening(id, after)
        while True:
            try:
                async with aclosing(self._received(listening)) as parts:
                    async for _ in parts:
                        for event in listening.events():
                            yield event
                        if listening.ended:
                            return
                listening.finish()
            except FAILURES as error:
                await asyncio.sleep(listening.failed(error))
