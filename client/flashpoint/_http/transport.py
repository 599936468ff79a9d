"""httpx transports that send and receive tensors without copies, for `Client` and for `AsyncClient`.

Extensions of a request:

- `parts`: the body, as memoryviews.
- `deadline`: a time of `time.monotonic`, or None. It holds for all waits of the exchange.
- `stop`: a socket. When it becomes readable, the blocking transport raises ReadError.

A response has the extension `read_into(memoryview, least) -> int`, which reads the body into a buffer: at least `least`
bytes, fewer only at the end of the body. Its `stream` can only be closed. Proxies are not supported: httpx's own
transports serve them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import sys
import time
import urllib.request

import httpx

from flashpoint._http.connection import Connection
from flashpoint._http.drive import readable, run, run_async
from flashpoint._http.http1 import Reply

IDLE_CONNECTIONS = 64  # of one client
IDLE_SECONDS = 4.0  # less than servers' idle timeouts (uvicorn: 5 s): a server must not close a connection in use
_PORTS = {"http": 80, "https": 443}
ASYNC = sys.platform != "win32"  # whether asyncio's own loop has `add_reader`


def is_direct(url: httpx.URL) -> bool:
    """Return whether `url` is HTTP or HTTPS, and the environment names no proxy for it."""
    proxies = urllib.request.getproxies()
    proxied = proxies.get(url.scheme) or proxies.get("all")
    return url.scheme in _PORTS and (not proxied or bool(urllib.request.proxy_bypass(url.host)))


class _Origin:
    """The server address of a client, and its idle connections. The most recent one is used first. Thread-safe."""

    def __init__(self, url: httpx.URL, tls: ssl.SSLContext | None) -> None:
        self.host = url.raw_host.decode("ascii")
        self.port = url.port or _PORTS[url.scheme]
        self._secure = url.scheme == "https"
        self._tls = tls
        self._idle: list[tuple[Connection, float]] = []
        self._closed = False

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        return (self._tls or httpx.create_ssl_context()) if self._secure else None

    def take(self) -> Connection | None:
        """Return an idle connection that is still open, or None."""
        while self._idle:
            try:
                connection, since = self._idle.pop()
            except IndexError:  # another thread has taken it
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


class _Body(httpx.SyncByteStream):
    """The body of an answer. Closing it gives the connection back."""

    def __init__(self, origin: _Origin, connection: Connection, reply: Reply, request: httpx.Request) -> None:
        self._origin = origin
        self._connection = connection
        self._reply = reply
        self._deadline = request.extensions["deadline"]
        self._stop = request.extensions.get("stop")

    def read_into(self, view: memoryview, least: int) -> int:
        steps = self._connection.read_into(self._reply, view, least)
        return run(steps, self._deadline, httpx.ReadTimeout, self._stop)

    def close(self) -> None:
        self._origin.give(self._connection, self._reply)


class Transport(httpx.BaseTransport):
    """A transport that blocks the calling thread. Thread-safe: each exchange has its own connection, reused later."""

    def __init__(self, url: httpx.URL, tls: ssl.SSLContext | None = None) -> None:
        self._origin = _Origin(url, tls)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        deadline, stop = request.extensions["deadline"], request.extensions.get("stop")
        connection = self._origin.take() or self._connect(deadline, stop)
        try:
            reply = run(connection.exchange(request), deadline, httpx.ReadTimeout, stop)
        except BaseException:
            connection.close()
            raise
        body = _Body(self._origin, connection, reply, request)
        return httpx.Response(
            reply.status, headers=reply.headers, stream=body, extensions={"read_into": body.read_into}
        )

    def _connect(self, deadline: float | None, stop: socket.socket | None) -> Connection:
        to = self._origin
        failure: Exception = httpx.ConnectError("the host has no address")
        try:
            addresses = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        for family, kind, protocol, _, address in addresses:
            connection = Connection(family, kind, protocol)
            try:
                run(connection.open(address, to.tls, to.host), deadline, httpx.ConnectTimeout, stop)
                return connection
            except httpx.ConnectError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
        raise failure

    def close(self) -> None:
        self._origin.close()


class _AsyncBody(httpx.AsyncByteStream):
    """`_Body` for asyncio."""

    def __init__(self, origin: _Origin, connection: Connection, reply: Reply, deadline: float | None) -> None:
        self._origin = origin
        self._connection = connection
        self._reply = reply
        self._deadline = deadline

    async def read_into(self, view: memoryview, least: int) -> int:
        return await run_async(self._connection.read_into(self._reply, view, least), self._deadline, httpx.ReadTimeout)

    async def aclose(self) -> None:
        self._origin.give(self._connection, self._reply)


class AsyncTransport(httpx.AsyncBaseTransport):
    """`Transport` for asyncio event loops that have `add_reader`. A cancelled exchange closes its connection."""

    def __init__(self, url: httpx.URL, tls: ssl.SSLContext | None = None) -> None:
        self._origin = _Origin(url, tls)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        deadline = request.extensions["deadline"]
        connection = self._origin.take() or await self._connect(deadline)
        try:
            reply = await run_async(connection.exchange(request), deadline, httpx.ReadTimeout)
        except BaseException:
            connection.close()
            raise
        body = _AsyncBody(self._origin, connection, reply, deadline)
        return httpx.Response(
            reply.status, headers=reply.headers, stream=body, extensions={"read_into": body.read_into}
        )

    async def _connect(self, deadline: float | None) -> Connection:
        to = self._origin
        failure: Exception = httpx.ConnectError("the host has no address")
        left = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                looked_up = asyncio.get_running_loop().getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
                addresses = await looked_up
        except TimeoutError as error:
            raise httpx.ConnectTimeout("the deadline passed") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        for family, kind, protocol, _, address in addresses:
            connection = Connection(family, kind, protocol)
            try:
                await run_async(connection.open(address, to.tls, to.host), deadline, httpx.ConnectTimeout)
                return connection
            except httpx.ConnectError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
        raise failure

    async def aclose(self) -> None:
        self._origin.close()
