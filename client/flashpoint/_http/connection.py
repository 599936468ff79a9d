"""A connection to the server as steps that never block: each yields what its socket must be ready for.

`drive` runs the steps, one way for threads and one for asyncio: what is sent and received is the same in both.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Generator, Iterable
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, NamedTuple, TypeAlias, TypeVar

import httpx

from flashpoint._http.http1 import Reply, packets

T = TypeVar("T")
RECEIVE = 64 * 1024  # bytes received at once where they are not the caller's yet
_BUSY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_CONNECTING = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", 0)}


class Wait(NamedTuple):
    """Go on when descriptor `fd` has one of `events`, of EVENT_READ and EVENT_WRITE, and say which it has."""

    fd: int
    events: int


Steps: TypeAlias = Generator[Wait, int, T]


def _wanted(busy: OSError) -> int:
    """Return the event a socket waits for after it could not receive: TLS may have to send first."""
    return EVENT_WRITE if isinstance(busy, ssl.SSLWantWriteError) else EVENT_READ


class Connection:
    """A connection, plain or TLS; one exchange at a time. Its steps raise httpx's transport errors.

    `family`, `kind` and `protocol` are as `getaddrinfo` gives them.
    """

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()
        self._scratch = memoryview(bytearray(RECEIVE))
        self._sent_all = False

    def open(self, address: Any, tls: ssl.SSLContext | None, host: str) -> Steps[None]:
        """Connect to `address`, and shake hands with `host` where there is `tls`."""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self._socket.connect_ex(address)
            if code in _CONNECTING:
                yield Wait(self._fd, EVENT_WRITE)
                code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if tls is not None:
                secure = tls.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
                self._socket = secure
                yield from self._shake_hands(secure)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error

    def _shake_hands(self, secure: ssl.SSLSocket) -> Steps[None]:
        while True:
            try:
                return secure.do_handshake()
            except _BUSY as busy:
                yield Wait(self._fd, _wanted(busy))

    @property
    def idle(self) -> Wait:
        """Return the wait that ends when the server closes an idle connection: it sends nothing else then."""
        return Wait(self._fd, EVENT_READ)

    def exchange(self, request: httpx.Request) -> Steps[Reply]:
        """Send `request` and receive until its answer has begun.

        A server may answer before it has read everything, and hang up: sending ends there, and the answer counts.
        """
        reply = Reply(request)
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

    def read_into(self, reply: Reply, view: memoryview, least: int) -> Steps[int]:
        """Read the answer's body into `view` (flat bytes): `least` bytes or more, fewer where it ends; how many."""
        filled = reply.take(view)
        while filled < least and not reply.done:
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
        """Whether `reply`'s exchange is over on both sides."""
        return self._sent_all and reply.reusable

    def close(self) -> None:
        self._socket.close()

    def _send(self, parts: Iterable[memoryview], reply: Reply) -> Steps[OSError | None]:
        """Send all, or until the server has answered or hung up; the error that ended it."""
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
        """Whether the server, which has sent something, has begun its answer or hung up."""
        try:
            count = self._socket.recv_into(self._scratch)
        except _BUSY:
            return False  # TLS's own traffic
        except OSError:
            return True  # what is to be said of it is said when receiving
        if count:
            reply.receive(bytes(self._scratch[:count]))
        return reply.begun or not count

    def _receive_into(self, reply: Reply) -> Steps[None]:
        count = yield from self._receive(self._scratch)
        reply.receive(bytes(self._scratch[:count]))

    def _receive(self, view: memoryview) -> Steps[int]:
        """Receive once, 0 where the server has closed. Waits first, so that a fast server starves no one else."""
        events = EVENT_READ
        while True:
            if not (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
                yield Wait(self._fd, events)
            try:
                return self._socket.recv_into(view)
            except _BUSY as busy:
                events = _wanted(busy)
            except OSError as error:
                raise httpx.ReadError(str(error)) from error
