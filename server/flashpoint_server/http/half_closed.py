"""Connections whose clients have sent all that they will send, and may still read.

A client that ends its sending alone (`shutdown(SHUT_WR)`) looks like one that has closed its connection: the end of
input is all that comes of either. Only a client that has closed answers what it is sent with a reset. The transport,
which reads no more, would see that at its next write; here epoll tells of it when it comes.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress

# A client that leaves later sends nothing at all: its kernel forgets the connection after a minute (tcp_fin_timeout),
# and answers the next of these probes with a reset.
_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class HalfClosed:
    """Those of one event loop."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._gone: dict[int, Callable[[], None]] = {}  # by descriptor

    def watch(self, connection: socket.socket, gone: Callable[[], None]) -> None:
        """Call `gone` once the client has reset the connection, unless `forget` comes first. Raises OSError."""
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._tell)
        for option, value in _PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._epoll.register(connection.fileno(), 0)  # of errors and of resets it tells unasked
        self._gone[connection.fileno()] = gone

    def forget(self, connection: socket.socket) -> None:
        """The connection is about to be closed."""
        assert self._epoll is not None
        if self._gone.pop(connection.fileno(), None) is not None:
            with suppress(OSError):
                self._epoll.unregister(connection.fileno())

    def _tell(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            self._epoll.unregister(descriptor)
            self._gone.pop(descriptor)()
