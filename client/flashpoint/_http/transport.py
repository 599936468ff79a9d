"""httpx transports that send and receive tensors without copies, for `Client` and for `AsyncClient`.

A request has the extensions `parts` (the body, as memoryviews), `deadline` (a time of `time.monotonic`, or None, for
all waits of the exchange) and `stop` (a socket: when it becomes readable, the blocking transport raises ReadError).

A response has the extension `read_into(memoryview, minimum) -> int`. It reads the body into a buffer: at least
`minimum` bytes, fewer only at the end of the body. Its `stream` can only be closed.
"""

from __future__ import annotations

import contextlib
import ssl
import sys
import time
from collections.abc import Callable

import httpx

from flashpoint._http import forked, proxies
from flashpoint._http.connection import Connection, Target, race
from flashpoint._http.dial import resolve
from flashpoint._http.drive import Steps, readable, run, run_async
from flashpoint._http.http1 import Reply

IDLE_CONNECTIONS = 64  # maximum idle connections of one client
IDLE_SECONDS = 4.0  # less than servers' idle timeouts (uvicorn: 5 s): a server must not close a connection in use
ASYNC = sys.platform != "win32"  # whether asyncio's own loop has `add_reader`


class _Origin:
    """The server address of a client, and its idle connections. The most recent one is used first. Thread-safe."""

    def __init__(self, url: httpx.URL, tls: ssl.SSLContext | None, proxy: proxies.Proxy | None) -> None:
        self._host = url.raw_host.decode("ascii")
        self._port = url.port or proxies.PORTS[url.scheme]
        self._secure = url.scheme == "https"
        self._tls = tls
        self._proxy = proxy
        self._known: Target | None = None
        self._idle: list[tuple[Connection, float]] = []
        self._closed = False
        forked.watch(self)

    def forked(self) -> None:
        self._idle = []  # forget the connections, which belong to the parent

    def connect(self) -> Steps[Connection]:
        """Return a new connection. Raises httpx's transport errors."""
        route = self._route()
        to = (self._host, self._port) if route.proxy is None else (route.proxy.host, route.proxy.port)

        try:
            addresses = yield from resolve(*to)
        except httpx.ConnectError as error:
            raise (error if route.proxy is None else httpx.ProxyError(f"{route.proxy}: {error}")) from error
        return (yield from race(addresses, route))

    def _route(self) -> Target:
        """Return the `Target` of the server. The system's certificates are loaded for the first connection."""
        if self._known is None:
            nested = self._proxy is not None and self._proxy.scheme == "https"
            try:
                tls = (self._tls or httpx.create_ssl_context()) if self._secure else None
                proxy_tls = httpx.create_ssl_context() if nested else None
            except OSError as error:
                raise httpx.ConnectError(f"the certificates of the authorities cannot be loaded: {error}") from error
            self._known = Target(self._host, self._port, tls, self._proxy, proxy_tls)
        return self._known

    def take(self) -> Connection | None:
        """Return an idle connection that is still open, or None."""
        while self._idle:
            try:
                connection, since = self._idle.pop()
            except IndexError:  # another thread has taken the last connection
                break
            if time.monotonic() - since < IDLE_SECONDS and not readable(connection.idle):
                return connection
            connection.close()
        return None

    def give(self, connection: Connection, reply: Reply) -> None:
        """Keep a connection for the next exchange, or close it."""
        if len(self._idle) < IDLE_CONNECTIONS and connection.reusable(reply):
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop()[0].close()


class _Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of an answer. Closing it makes the connection idle, or closes the connection."""

    def __init__(self, origin: _Origin, connection: Connection, reply: Reply, request: httpx.Request) -> None:
        self._origin = origin
        self._connection = connection
        self._reply = reply
        self._deadline = request.extensions["deadline"]
        self._stop = request.extensions.get("stop")

    def read_into(self, view: memoryview, minimum: int) -> int:
        steps = self._connection.read_into(self._reply, view, minimum)
        return run(steps, self._deadline, httpx.ReadTimeout, self._stop)

    async def async_read_into(self, view: memoryview, minimum: int) -> int:
        steps = self._connection.read_into(self._reply, view, minimum)
        return await run_async(steps, self._deadline, httpx.ReadTimeout)

    def response(self, read_into: Callable[..., object]) -> httpx.Response:
        head = self._reply
        return httpx.Response(head.status, headers=head.headers, stream=self, extensions={"read_into": read_into})

    def close(self) -> None:
        self._origin.give(self._connection, self._reply)

    async def aclose(self) -> None:
        self.close()


class _Own:
    """The base class of both transports. Raises ValueError if the environment names a proxy that cannot be used."""

    def __init__(self, url: httpx.URL, tls: ssl.SSLContext | None = None) -> None:
        self._origin = _Origin(url, tls, proxies.of_environment(url))


class Transport(_Own, httpx.BaseTransport):
    """A transport that blocks the calling thread. Thread-safe: each exchange has its own connection, reused later."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        deadline, stop = request.extensions["deadline"], request.extensions.get("stop")
        connection = self._origin.take() or run(self._origin.connect(), deadline, httpx.ConnectTimeout, stop)
        try:
            reply = run(connection.exchange(request), deadline, httpx.ReadTimeout, stop)
        except BaseException:
            connection.close()
            raise
        body = _Body(self._origin, connection, reply, request)
        return body.response(body.read_into)

    def close(self) -> None:
        self._origin.close()


class AsyncTransport(_Own, httpx.AsyncBaseTransport):
    """`Transport` for asyncio event loops that have `add_reader`. A cancelled exchange closes its connection."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        deadline = request.extensions["deadline"]
        connection = self._origin.take()
        if connection is None:
            connection = await run_async(self._origin.connect(), deadline, httpx.ConnectTimeout)
        try:
            reply = await run_async(connection.exchange(request), deadline, httpx.ReadTimeout)
        except BaseException:
            connection.close()
            raise
        body = _Body(self._origin, connection, reply, request)
        return body.response(body.async_read_into)

    async def aclose(self) -> None:
        self._origin.close()
