"""A connection to the server. `race` and its methods are generators that yield the events to wait for, for `drive`."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE

import httpx

from flashpoint._http import forked
from flashpoint._http.dial import Address
from flashpoint._http.drive import Several, Steps, Wait
from flashpoint._http.http1 import Reply, packets
from flashpoint._http.proxies import NestedTls, Proxy

ATTEMPT_DELAY = 0.25  # seconds until the next address is tried too; RFC 8305, section 5, recommends 250 ms
SETUP_DELAY = 2.0  # like ATTEMPT_DELAY, if a server has accepted a connection: TLS needs several round trips
RECEIVE = 64 * 1024  # bytes of the buffer for data that cannot go straight into the caller's memory
_BUSY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_CONNECTING = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", 0)}


@dataclass(frozen=True)
class Target:
    """A server's address and TLS settings, and the proxy on the way to it."""

    host: str
    port: int
    tls: ssl.SSLContext | None  # None for HTTP
    proxy: Proxy | None = None
    proxy_tls: ssl.SSLContext | None = None


def _wanted(busy: OSError) -> int:
    """Return the event to wait for after a socket operation that would block. Even a TLS read may have to send."""
    return EVENT_WRITE if isinstance(busy, ssl.SSLWantWriteError) else EVENT_READ


class Connection:
    """A plain or TLS connection for one exchange at a time. Its generators raise httpx's transport errors."""

    def __init__(self, address: Address, route: Target) -> None:
        self._socket: socket.socket | NestedTls = socket.socket(address.family, address.kind, address.protocol)
        forked.watch(self)
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()
        self._address = address.address
        self._route = route
        self._scratch = memoryview(bytearray(RECEIVE))
        self._sent_all = False
        self.connected = self._closed = False  # `connected`: the other side has accepted the connection

    def open(self) -> Steps[None]:
        """Connect, through the proxy if there is one. Perform the TLS handshake with an HTTPS server."""
        to, proxy = self._route, self._route.proxy
        try:
            yield from self._connect()
            if proxy is not None:
                yield from self._enter(proxy)
            if to.tls is not None:
                yield from self._secure(to.tls, to.host)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error

    def _connect(self) -> Steps[None]:
        assert isinstance(self._socket, socket.socket)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self._socket.connect_ex(self._address)
        if code in _CONNECTING:
            yield Wait(self._fd, EVENT_WRITE)
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self.connected = True

    def _enter(self, proxy: Proxy) -> Steps[None]:
        try:
            if self._route.proxy_tls is not None:
                yield from self._secure(self._route.proxy_tls, proxy.host)
            if self._route.tls is not None or not proxy.forwards:
                yield from proxy.tunnel(self, self._route.host, self._route.port)
        except (OSError, httpx.TransportError) as error:
            raise httpx.ProxyError(f"{proxy}: {error}") from error

    def _secure(self, tls: ssl.SSLContext, host: str) -> Steps[None]:
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket = NestedTls(self._socket, tls, host)
        else:
            assert isinstance(self._socket, socket.socket)
            self._socket = tls.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        while True:
            try:
                return self._socket.do_handshake()
            except _BUSY as busy:
                yield Wait(self._fd, _wanted(busy))

    def forked(self) -> None:
        self.close()

    @property
    def idle(self) -> Wait:
        """Return a wait that ends when the server closes this idle connection; an idle server sends no data."""
        return Wait(self._fd, EVENT_READ)

    def exchange(self, request: httpx.Request) -> Steps[Reply]:
        """Send `request`, and receive the status and the headers of the answer. An early answer ends the sending."""
        proxy = self._route.proxy
        forwarding = proxy if proxy is not None and proxy.forwards and self._route.tls is None else None
        reply = Reply(request, forwarding)
        self._sent_all = False
        failure = yield from self._send(packets(reply.request_head, request.extensions["parts"]), reply)
        try:
            while not reply.begun:
                yield from self._receive_into(reply)
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            if failure is not None:
                raise httpx.WriteError(str(failure)) from failure
            raise
        return reply

    def read_into(self, reply: Reply, view: memoryview, minimum: int) -> Steps[int]:
        """Read at least `minimum` bytes of the body into `view` (flat bytes); fewer at its end. Return the count."""
        filled = reply.take(view)
        while filled < minimum and not reply.done:
            if reply.left is None:
                yield from self._receive_into(reply)
                filled += reply.take(view[filled:])
                continue
            count = yield from self._receive(view[filled : filled + reply.left])
            if not count:
                raise httpx.RemoteProtocolError(f"the server closed the connection {reply.left} bytes before its end")
            reply.left -= count
            filled += count
        return filled

    def reusable(self, reply: Reply) -> bool:
        """Return whether the request has been sent and the answer read, so that another exchange may follow."""
        return self._sent_all and reply.reusable and not self._closed

    def close(self) -> None:
        """Close the descriptor. Send no TLS close_notify, because another process may have a copy of the connection."""
        self._closed = True
        self._socket.close()

    def write(self, data: bytes) -> Steps[None]:
        """Send bytes to a proxy."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except _BUSY as busy:
                yield Wait(self._fd, EVENT_WRITE if isinstance(busy, BlockingIOError) else _wanted(busy))

    def read(self, size: int) -> Steps[bytes]:
        """Receive at most `size` bytes from a proxy."""
        view = self._scratch[:size]
        return bytes(view[: (yield from self._receive(view))])

    def _send(self, parts: Iterable[memoryview], reply: Reply) -> Steps[OSError | None]:
        """Send `parts`, but stop if the server answers or closes. Return the OSError that stopped this, or None."""
        for part in parts:
            rest = part
            while rest:
                events = EVENT_READ | EVENT_WRITE
                try:
                    rest = rest[self._socket.send(rest) :]
                except ssl.SSLWantReadError:
                    events = EVENT_READ
                except _BUSY:
                    pass
                except OSError as error:
                    return error
                if rest and (yield Wait(self._fd, events)) & EVENT_READ and self._answered(reply):
                    return None
        self._sent_all = True
        return None

    def _answered(self, reply: Reply) -> bool:
        """Receive once. Return whether the server has begun its answer or closed the connection."""
        try:
            count = self._socket.recv_into(self._scratch)
        except _BUSY:
            return False  # only TLS records without data arrived
        except OSError:
            return True  # the next receive raises the error
        if count:
            reply.receive(bytes(self._scratch[:count]))
        return reply.begun or not count

    def _receive_into(self, reply: Reply) -> Steps[None]:
        count = yield from self._receive(self._scratch)
        reply.receive(bytes(self._scratch[:count]))

    def _receive(self, view: memoryview) -> Steps[int]:
        """Receive once, and return the number of bytes: 0 if the server has closed the connection."""
        events = EVENT_READ  # wait even before the first receive, or a fast server could starve tasks of the event loop
        while True:
            if self._closed:  # the caller has closed it, or this process was forked
                raise httpx.ReadError("the connection is closed")
            if not (isinstance(self._socket, (ssl.SSLSocket, NestedTls)) and self._socket.pending()):
                yield Wait(self._fd, events)
            try:
                return self._socket.recv_into(view)
            except _BUSY as busy:
                events = _wanted(busy)
            except OSError as error:
                raise httpx.ReadError(str(error)) from error


def race(addresses: Sequence[Address], target: Target) -> Steps[Connection]:
    """Return the first connection that is set up. Try the next address after a delay, or when an attempt fails.

    This is Happy Eyeballs (RFC 8305). Raises httpx.ConnectError with all failures.
    """
    waiting, failures = list(addresses), list[httpx.TransportError]()
    running: dict[Connection, tuple[Steps[None], Wait]] = {}
    begun = 0.0  # time of the latest attempt

    def advance(attempt: Connection, steps: Steps[None], ready: int | None) -> bool:
        """Run an attempt until it waits or fails. Return whether the connection is set up."""
        try:
            wait = steps.send(ready)
            assert isinstance(wait, Wait)
            running[attempt] = steps, wait
        except StopIteration:
            del running[attempt]
            return True
        except httpx.TransportError as error:
            del running[attempt]
            attempt.close()
            failures.append(error)
        return False

    try:
        while waiting or running:
            delay = SETUP_DELAY if any(each.connected for each in running) else ATTEMPT_DELAY
            pause = begun + delay - time.monotonic() if running else 0.0
            if waiting and pause <= 0:
                begun = time.monotonic()
                try:
                    attempt = Connection(waiting.pop(0), target)
                except OSError as error:  # no descriptor is left, or this machine does not have the address family
                    failures.append(httpx.ConnectError(str(error)))
                    continue
                steps, ready = attempt.open(), None
                running[attempt] = steps, Wait(-1, 0)
            else:
                event = yield Several(tuple(wait for _, wait in running.values()), pause if waiting else None)
                if event is None:
                    continue
                attempt, (steps, _) = next(one for one in running.items() if one[1][1].fd == event.fd)
                ready = event.events
            if advance(attempt, steps, ready):
                return attempt
            if attempt not in running:
                begun = 0.0  # the attempt failed: try the next address at once
        if not failures:
            raise httpx.ConnectError("the host has no address")
        failures[-1].args = ("; ".join(dict.fromkeys(map(str, failures))),)  # each text once
        raise failures[-1]
    finally:
        for attempt, (steps, _) in running.items():
            steps.close()
            attempt.close()
