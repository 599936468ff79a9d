"""`Client`, which blocks the calling thread."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Self, Unpack

import httpx

from flashpoint._calls import caches as cache_calls
from flashpoint._calls import service, verification
from flashpoint._calls.arrays import Array
from flashpoint._calls.keywords import Benchmark, CacheSizes, Verify, call
from flashpoint._calls.results import VerifyReport
from flashpoint._calls.service import Call, R, SavedAttention
from flashpoint._client import saved as _saved
from flashpoint._client.attending import Attending
from flashpoint._client.caches import Cache
from flashpoint._client.runs import BenchmarkRun
from flashpoint._client.settings import FAILURES, NOT_THERE, RETRIES, TIMEOUT, ClientSettings
from flashpoint._http.exchange import Exchange
from flashpoint._http.transport import Transport
from flashpoint.errors import CacheError
from flashpoint_contract.schemas.benchmark import BenchmarkEvent


class Client(Attending, ClientSettings[httpx.Client]):
    """A client of a Flashpoint server. Thread-safe; it keeps and reuses its connections.

        with flashpoint.Client("http://localhost:8000") as client:
            o = client.attention(q, k, v, causal=True)

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
        """Make a client. Nothing is sent yet.

        Args:
            url: Address of the server. None is FLASHPOINT_URL, or http://localhost:8000.
            api_key: Sent as a bearer key. None is FLASHPOINT_API_KEY, if it is set; "" sends none.
            timeout: Seconds for a whole call, retries included. The server knows it as the deadline. None waits without
                end.
            retries: How often a call is sent again: when there was no connection or it broke (also a proxy's own 500 or
                502), or the server was full (429) or not ready (503). The delay is the server's `Retry-After`
                and up to 0.5 s more at random, or doubles.
            tls: TLS settings, for a private certificate authority or a client certificate. None is the system's
                authorities.
            replica: Sent as X-Flashpoint-Replica when caches are made, for a balancer that routes by that header. Later
                calls with a cache send the value from the answers. Printable ASCII, up to 128 characters.
            transport: httpx transport in place of the client's own, which is used where the environment names no proxy.
                Another transport applies the timeout to each wait, so an answer that stalls may take longer.

        Raises:
            InvalidInputError: an argument is not valid.
        """
        super().__init__(url, api_key, timeout, retries, tls, replica, transport)

    def _connect(self) -> None:
        self._own = self._direct(Transport) if self._transport is None else None
        self._http = httpx.Client(transport=self._own or self._transport, **self._http_settings())

    def delete_saved(self, saved: SavedAttention | str) -> None:
        """Free a forward: `saved` is the result of `attention` with `save=True`, or its id. It may be gone already."""
        return self._call(_saved.delete(saved))

    @call
    def cache(self, **shape: Unpack[CacheSizes]) -> Cache:
        """Make a KV cache on the server, which holds the keys and values of one sequence.

        A size is one number for all layers, or a sequence with one for each layer. The end of a `with` deletes the
        cache.
        """
        return Cache(self, self._call(cache_calls.create(shape))[0])

    @call
    def caches(self, count: int, **shape: Unpack[CacheSizes]) -> list[Cache]:
        """Make `count` empty caches of one shape on one engine, so that one call can use all of them."""
        return [Cache(self, one) for one in self._call(cache_calls.create(shape, count))]

    @call
    def fork_caches(
        self, caches: Sequence[Cache], lengths: Sequence[int] | None = None, free: Sequence[Cache] = ()
    ) -> list[Cache]:
        """Copy caches, and delete others: all at once, or nothing. Copies share memory until they are written.

        Args:
            caches: Caches to copy. One that is named several times is copied as often.
            lengths: Number of tokens of each copy. None copies all tokens.
            free: Caches to delete.

        Returns:
            The copies, in the order of `caches`.
        """
        return [Cache(self, one) for one in self._call(cache_calls.fork(caches, lengths, free))]

    def list_caches(self) -> list[Cache]:
        """Return all caches of this API key on the server, in the order of their creation.

        Behind a balancer, these are the caches of the replica that answers.
        """
        page = self._call(cache_calls.listed(None))
        found = page.caches
        while page.after is not None:
            page = self._call(cache_calls.listed(page.after))
            found += page.caches
        return [Cache(self, one) for one in found]

    def delete_caches(self, caches: Sequence[Cache]) -> None:
        """Free the memory of several `caches` in one call. Caches that are gone already are ignored."""
        try:
            self._call(cache_calls.delete_many(caches))
        except CacheError:  # the server has deleted none of the caches
            for cache in caches:
                cache.delete()

    @call
    def verify(
        self, q: Array | None = None, k: Array | None = None, v: Array | None = None, **keywords: Unpack[Verify]
    ) -> VerifyReport:
        """Compare a backend's answers, or your own, with float64, and judge whether they are near enough.

        The problem has your q, k and v. If you pass any of `o`, `lse`, `dq`, `dk`, `dv`, `dattn_mask` and `dsinks`,
        these are judged, otherwise the answers of a backend. Without q, k and v the server draws a problem by `shape`,
        `dtype`, `seed`, `direction` and `extras`.

        Args:
            q: Queries, (B, Hq, Sq, D) in layout `bhsd`. None: the server draws the tensors.

        Returns:
            The errors of each tensor, their bounds, and the verdict `ok`.
        """
        return self._call(verification.verify(q, k, v, keywords))

    @call
    def benchmark(self, **keywords: Unpack[Benchmark]) -> BenchmarkRun:
        """Start a benchmark of a grid of cases, or of a preset, on the server's device. Return it without waiting.

        If the connection breaks after the call was sent, it is not sent again: that could start two benchmarks.
        """
        return BenchmarkRun(self, self._call(verification.submit(keywords)).id)

    def benchmark_run(self, id: str) -> BenchmarkRun:
        """Return the benchmark with this `id`, which was started before. Nothing is sent yet."""
        return BenchmarkRun(self, id)

    def info(self) -> dict[str, Any]:
        """Return the server's versions, device, backends with their features, limits, and what it holds."""
        document: dict[str, Any] = self._call(service.lookup("/info"))
        return document

    def ready(self) -> bool:
        """Return whether the server takes work now. False also if no server answers."""
        return self._health("/health/ready")

    def live(self) -> bool:
        """Return whether the server's process runs. False also if no server answers."""
        return self._health("/health/live")

    def close(self) -> None:
        """Close the connections. The client cannot be used afterwards.

        Before that, wait at most 2 seconds until the server has freed the saved forwards that were released.
        """
        if not sys.is_finalizing():  # then a lock may belong to a thread that has ended, and the system closes sockets
            _saved.settle()
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _health(self, path: str) -> bool:
        try:
            self._run(self._exchange(service.lookup(path), once=True))
        except NOT_THERE:
            return False
        return True

    def _call(self, call: Call[R]) -> R:
        result: R = self._run(self._exchange(call))
        return result

    def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request: by our own transport with the cookies of httpx's client, or else by httpx's client."""
        if self._own is None or self._http.is_closed:  # if httpx's client is closed, its `send` raises the error
            self._check_process()
            return self._http.send(request, stream=True)
        return self._with_cookies(self._own.handle_request(request), request)

    def _received(self, exchange: Exchange) -> Generator[None]:
        """Make one attempt of a call. Yield after each part of the answer that has arrived."""
        response = self._send(exchange.request(self._http))
        try:
            exchange.begin(response)
            if read_into := response.extensions.get("read_into"):  # only our own transport has this extension
                while count := read_into(space := exchange.space(), exchange.minimum(space)):
                    exchange.filled(count)
                    yield
            else:
                assert isinstance(response.stream, httpx.SyncByteStream)
                for chunk in response.stream:
                    exchange.feed(chunk)
                    yield
        finally:
            response.close()

    def _run(self, exchange: Exchange) -> Any:
        while True:
            try:
                for _ in self._received(exchange):
                    pass
                return exchange.answer()
            except FAILURES as error:
                delay = exchange.failed(error)
            time.sleep(delay)

    def _listen(self, id: str, after: int) -> Iterator[BenchmarkEvent]:
        listening = self._listening(id, after)
        while True:
            try:
                with closing(self._received(listening)) as parts:
                    for _ in parts:
                        yield from listening.events()
                        if listening.ended:
                            return
                listening.finish()
            except FAILURES as error:
                time.sleep(listening.failed(error))
