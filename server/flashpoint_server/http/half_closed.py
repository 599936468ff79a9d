"""Detect that a client which had ended its sending has also closed its connection.

A client that only ends its sending (`shutdown(SHUT_WR)`) first looks like one that closes its connection: both send a
FIN. The difference shows when the server sends data: a closed connection answers with a reset. The transport has
stopped reading and would notice the reset only at its next write, but epoll reports it at once.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress

# A client that closes its connection after the half-close sends nothing more. TCP keep-alive probes detect this: the
# client's kernel forgets the connection after a minute (tcp_fin_timeout), and answers the next probe with a reset.
_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


class HalfClosed:
    """The half-closed connections of one event loop."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._gone: dict[int, Callable[[], None]] = {}  # by descriptor

    def watch(self, connection: socket.socket, gone: Callable[[], None]) -> None:
        """Call `gone` when the client resets the connection, unless `forget` is called first. Raises OSError."""
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._tell)
        for option, value in _PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._epoll.register(connection.fileno(), 0)  # 0: no events; epoll reports errors and resets anyway
        self._gone[connection.fileno()] = gone

    def forget(self, connection: socket.socket) -> None:
        """Stop watching a connection that is about to be closed."""
        assert self._epoll is not None
        if self._gone.pop(connection.fileno(), None) is not None:
            with suppress(OSError):
                self._epoll.unregister(connection.fileno())

    def _tell(self) -> None:
        assert self._epoll is not None
        for descriptor, _ in self._epoll.poll(0):
            self._epoll.unregister(descriptor)
            self._gone.pop(descriptor)()
