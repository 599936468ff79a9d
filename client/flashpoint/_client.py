"""The two clients, `Client` and its asyncio twin: they differ in how they send, read and sleep, and in nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar, Unpack

import httpx

from flashpoint import _caches, _calls, _proof, _saved
from flashpoint._arrays import Array
from flashpoint._attending import AsyncAttending, Attending
from flashpoint._caches import AsyncCache, Cache, CacheSizes
from flashpoint._calls import DEFAULT, Call, SavedAttention
from flashpoint._http.exchange import Exchange
from flashpoint._http.listening import Listening
from flashpoint._http.transport import ASYNC, AsyncTransport, Transport, is_direct
from flashpoint._proof import Benchmark, Verify
from flashpoint._runs import AsyncBenchmarkRun, BenchmarkRun
from flashpoint.benchmark_schema import BenchmarkEvent
from flashpoint.errors import CacheError, ConnectionFailedError, FlashpointError, OverloadedError, invalid
from flashpoint.verify_schema import VerifyReport

DEFAULT_URL = "http://localhost:8000"
TIMEOUT = 60.0  # seconds, for a whole call
LONGEST_TIMEOUT = 1_000_000  # seconds; the settings of a server go as far, and a socket's wait not much further
RETRIES = 4
_FAILURES = (httpx.TransportError, FlashpointError)
_NOT_THERE = (OverloadedError, ConnectionFailedError)

Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
Direct = TypeVar("Direct", Transport, AsyncTransport)


class _Settings(Generic[Http]):
    """Base of both clients: their settings."""

    _http: Http

    def __init__(
        self, url: str | None, api_key: str | None, timeout: float | None, retries: int, tls: ssl.SSLContext | None,
        replica: str,
    ) -> None:  # fmt: skip
        url = os.environ.get("FLASHPOINT_URL") or DEFAULT_URL if url is None else url
        if type(retries) is not int or retries < 0:
            raise invalid("retries", "must be an integer, 0 or more")
        try:
            self._parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise invalid("url", str(error)) from None
        if self._parsed.scheme not in ("http", "https") or not self._parsed.host:
            raise invalid("url", "must begin with http:// or https:// and name a host, as http://localhost:8000 does")
        self.url = url
        self._api_key = os.environ.get("FLASHPOINT_API_KEY") if api_key is None else api_key
        self._timeout = _seconds(timeout)
        self._retries = retries
        self._tls = tls
        if not isinstance(replica, str) or not (replica.isascii() and replica.isprintable() and len(replica) <= 128):
            raise invalid("replica", "must be printable ASCII of up to 128 characters")
        self._replica = replica

    def _http_settings(self) -> dict[str, Any]:
        headers = {"User-Agent": "flashpoint", "Accept-Encoding": "identity"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        # As many connections as there are callers: the server says when there are too many, and says so at once.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return {"base_url": self.url, "headers": headers, "limits": limits, "timeout": self._timeout,
                "verify": self._tls or True}  # fmt: skip

    def _direct(self, transport: Callable[[httpx.URL, ssl.SSLContext | None], Direct]) -> Direct | None:
        """Our own `transport`; None for httpx's, which knows proxies."""
        return transport(self._parsed, self._tls) if is_direct(self._parsed) else None

    def _exchange(self, call: Call, *, once: bool = False, stop: socket.socket | None = None) -> Exchange:
        if call.affinity is not None:
            call.affinity.replica = call.affinity.replica or self._replica
        timeout = self._timeout if call.timeout is DEFAULT else _seconds(call.timeout)
        return Exchange(call, timeout=timeout, retries=0 if once else self._retries, stop=stop)

    def _listening(self, id: str, after: int) -> Listening:
        return Listening(id, after, timeout=self._timeout, retries=self._retries)


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise invalid("timeout", "must be a number of seconds above 0 and up to 1,000,000, or None for no end")
    return float(timeout)


class Client(Attending, _Settings[httpx.Client]):
    """A client of the service at `url`. Thread-safe; connections are kept and reused.

    Without `url` it is FLASHPOINT_URL, or http://localhost:8000. `api_key` is sent as a bearer key; without it,
    FLASHPOINT_API_KEY is, if it is set; "" sends none. `timeout` is in seconds for a whole call, retries included, and
    is told to the server; None is no end. `retries` is how often a call is sent again when there was no connection, or
    it broke (a 500 or 502 of a proxy's own, too), or the server was full (429) or not ready (503): after its
    `Retry-After`, else after a delay that doubles. `tls` is for a private certificate authority, or for a client
    certificate.
    `replica` is sent as X-Flashpoint-Replica when caches are made, for a balancer that routes by a hash of that header;
    later calls with a cache send what the answers say.

    `transport` replaces the client's own, which is used where the environment names no proxy. Another than the client's
    own holds the timeout over each of its waits: a server that falls silent within its answer may overrun it.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout, retries, tls, replica)
        self._own = None if transport else self._direct(Transport)
        self._http = httpx.Client(transport=transport or self._own, **self._http_settings())

    def delete_saved(self, saved: SavedAttention | str) -> None:
        """Free a saved forward, given as the result of `attention` or its id. Do nothing where it is gone already."""
        with suppress(CacheError):
            self._call(_saved.delete(saved))

    def cache(self, **shape: Unpack[CacheSizes]) -> Cache:
        """Make a KV cache at the server, which holds the keys and values of one sequence. Keywords: `CacheSizes`.

        with client.cache(layers=12, kv_heads=8, head_dim=64) as cache:
            o = cache.attention(q, k, v, layer=0, causal=True)  # writes k and v, attends over all that is held
        """
        return Cache(self, self._call(_caches.create(shape))[0])

    def caches(self, count: int, **shape: Unpack[CacheSizes]) -> list[Cache]:
        """Make several caches of one shape, all on one engine, as a call over them needs."""
        return [Cache(self, one) for one in self._call(_caches.create(shape, count))]

    def fork_caches(
        self, caches: Sequence[Cache], lengths: Sequence[int] | None = None, free: Sequence[Cache] = ()
    ) -> list[Cache]:
        """Return a copy of each cache, which may be named several times, and delete `free`: all at once or nothing."""
        return [Cache(self, one) for one in self._call(_caches.fork(caches, lengths, free))]

    def delete_caches(self, caches: Sequence[Cache]) -> None:
        """Free the memory of several caches in one call; those that are gone already are left out."""
        try:
            self._call(_caches.delete_many(caches))
        except CacheError:  # then none was
            for cache in caches:
                cache.delete()

    def verify(
        self, q: Array | None = None, k: Array | None = None, v: Array | None = None, **keywords: Unpack[Verify]
    ) -> VerifyReport:
        """How far a backend's answers are from float64, and whether that is near enough.

        For a problem that the server draws: `shape` ({"q_len": 512, "head_dim": 64}, …), `dtype`, `seed`, `direction`.
        For tensors: q, k and v, with `do` for the gradients too; with any of `o`, `lse`, `dq`, `dk`, `dv`, … these are
        judged, wherever they were computed. `progress` is called as the server goes on. Keywords: `Verify`.
        """
        report: VerifyReport = self._call(_proof.verify(q, k, v, keywords))
        return report

    def benchmark(self, **keywords: Unpack[Benchmark]) -> BenchmarkRun:
        """Start to time a grid, or a preset, on the server's device. Keywords: `Benchmark`.

        Not sent again where the connection broke once it had been sent, which could start it twice.
        """
        return BenchmarkRun(self, self._call(_proof.submit(keywords)).id)

    def benchmark_run(self, id: str) -> BenchmarkRun:
        """A benchmark that was started before. Nothing is sent yet."""
        return BenchmarkRun(self, id)

    def info(self) -> dict[str, Any]:
        """The server's versions, device, backends, limits, and the options that each backend has."""
        found: dict[str, Any] = self._call(_calls.lookup("/info"))
        return found

    def ready(self) -> bool:
        """Whether the server takes work now; False also where there is none."""
        return self._health("/health/ready")

    def live(self) -> bool:
        """Whether the server's process runs; False also where there is none."""
        return self._health("/health/live")

    def close(self) -> None:
        """Close the connections, once released forwards are freed. The client cannot be used afterwards."""
        _saved.settle()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _health(self, path: str) -> bool:
        try:
            self._run(self._exchange(_calls.lookup(path), once=True))
        except _NOT_THERE:
            return False
        return True

    def _call(self, call: Call) -> Any:
        return self._run(self._exchange(call))

    def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Our own transport needs nothing of what httpx's client does around one, but for cookies."""
        if self._own is None or self._http.is_closed:  # httpx says so
            return self._http.send(request, stream=True)
        response = self._own.handle_request(request)
        if "set-cookie" in response.headers:  # a balancer's
            response.request = request
            self._http.cookies.extract_cookies(response)
        return response

    def _run(self, exchange: Exchange) -> Any:
        while True:
            try:
                response = self._send(exchange.request(self._http))
                try:
                    exchange.begin(response)
                    if read_into := response.extensions.get("read_into"):  # our own transport
                        while count := read_into(space := exchange.space(), exchange.least(space)):
                            exchange.filled(count)
                    else:
                        assert isinstance(response.stream, httpx.SyncByteStream)
                        for chunk in response.stream:
                            exchange.feed(chunk)
                finally:
                    response.close()
                return exchange.answer()
            except _FAILURES as error:
                delay = exchange.failed(error)
            time.sleep(delay)

    def _listen(self, id: str, after: int) -> Iterator[BenchmarkEvent]:
        listening = self._listening(id, after)
        while True:
            try:
                response = self._http.send(listening.request(self._http), stream=True)
                try:
                    listening.begin(response)
                    if read_into := response.extensions.get("read_into"):
                        while count := read_into(listening.space(), 1):
                            listening.filled(count)
                            yield from listening.events()
                            if listening.ended:
                                return
                    else:
                        assert isinstance(response.stream, httpx.SyncByteStream)
                        for chunk in response.stream:
                            listening.feed(chunk)
                            yield from listening.events()
                            if listening.ended:
                                return
                finally:
                    response.close()
                listening.finish()
            except _FAILURES as error:
                time.sleep(listening.failed(error))


class AsyncClient(AsyncAttending, _Settings[httpx.AsyncClient]):
    """The asyncio twin of `Client`: the same arguments, methods, answers and errors, awaited. For one event loop."""

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
        super().__init__(url, api_key, timeout, retries, tls, replica)
        self._own = self._direct(AsyncTransport) if transport is None and ASYNC else None
        self._http = httpx.AsyncClient(transport=transport or self._own, **self._http_settings())

    async def delete_saved(self, saved: SavedAttention | str) -> None:
        """See `Client.delete_saved`."""
        with suppress(CacheError):
            await self._call(_saved.delete(saved))

    async def cache(self, **shape: Unpack[CacheSizes]) -> AsyncCache:
        """See `Client.cache`: `async with await client.cache(…) as cache`."""
        return AsyncCache(self, (await self._call(_caches.create(shape)))[0])

    async def caches(self, count: int, **shape: Unpack[CacheSizes]) -> list[AsyncCache]:
        """See `Client.caches`."""
        return [AsyncCache(self, one) for one in await self._call(_caches.create(shape, count))]

    async def fork_caches(
        self, caches: Sequence[AsyncCache], lengths: Sequence[int] | None = None, free: Sequence[AsyncCache] = ()
    ) -> list[AsyncCache]:
        """See `Client.fork_caches`."""
        return [AsyncCache(self, one) for one in await self._call(_caches.fork(caches, lengths, free))]

    async def delete_caches(self, caches: Sequence[AsyncCache]) -> None:
        """See `Client.delete_caches`."""
        try:
            await self._call(_caches.delete_many(caches))
        except CacheError:
            for cache in caches:
                await cache.delete()

    async def verify(
        self, q: Array | None = None, k: Array | None = None, v: Array | None = None, **keywords: Unpack[Verify]
    ) -> VerifyReport:
        """See `Client.verify`."""
        report: VerifyReport = await self._call(_proof.verify(q, k, v, keywords))
        return report

    async def benchmark(self, **keywords: Unpack[Benchmark]) -> AsyncBenchmarkRun:
        """See `Client.benchmark`."""
        return AsyncBenchmarkRun(self, (await self._call(_proof.submit(keywords))).id)

    def benchmark_run(self, id: str) -> AsyncBenchmarkRun:
        """See `Client.benchmark_run`."""
        return AsyncBenchmarkRun(self, id)

    async def info(self) -> dict[str, Any]:
        """See `Client.info`."""
        found: dict[str, Any] = await self._call(_calls.lookup("/info"))
        return found

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return await self._health("/health/ready")

    async def live(self) -> bool:
        """See `Client.live`."""
        return await self._health("/health/live")

    async def aclose(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _health(self, path: str) -> bool:
        try:
            await self._run(self._exchange(_calls.lookup(path), once=True))
        except _NOT_THERE:
            return False
        return True

    async def _call(self, call: Call) -> Any:
        return await self._run(self._exchange(call))

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """See `Client._send`."""
        if self._own is None or self._http.is_closed:
            return await self._http.send(request, stream=True)
        response = await self._own.handle_async_request(request)
        if "set-cookie" in response.headers:
            response.request = request
            self._http.cookies.extract_cookies(response)
        return response

    async def _run(self, exchange: Exchange) -> Any:
        while True:
            try:
                response = await self._send(exchange.request(self._http))
                try:
                    exchange.begin(response)
                    if read_into := response.extensions.get("read_into"):
                        while count := await read_into(space := exchange.space(), exchange.least(space)):
                            exchange.filled(count)
                    else:
                        assert isinstance(response.stream, httpx.AsyncByteStream)
                        async for chunk in response.stream:
                            exchange.feed(chunk)
                finally:
                    await response.aclose()
                return exchange.answer()
            except _FAILURES as error:
                delay = exchange.failed(error)
            await asyncio.sleep(delay)

    async def _listen(self, id: str, after: int) -> AsyncIterator[BenchmarkEvent]:
        listening = self._listening(id, after)
        while True:
            try:
                response = await self._http.send(listening.request(self._http), stream=True)
                try:
                    listening.begin(response)
                    if read_into := response.extensions.get("read_into"):
                        while count := await read_into(listening.space(), 1):
                            listening.filled(count)
                            for event in listening.events():
                                yield event
                            if listening.ended:
                                return
                    else:
                        assert isinstance(response.stream, httpx.AsyncByteStream)
                        async for chunk in response.stream:
                            listening.feed(chunk)
                            for event in listening.events():
                                yield event
                            if listening.ended:
                                return
                finally:
                    await response.aclose()
                listening.finish()
            except _FAILURES as error:
                await asyncio.sleep(listening.failed(error))
