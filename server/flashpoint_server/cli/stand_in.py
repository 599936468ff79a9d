"""Answer on the listening socket in the place of the workers, while none is alive and after they have ended.

Without this, the system accepts connections that nobody answers, and resets them when the socket is closed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from functools import partial
from typing import Any

import structlog
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from flashpoint_server.config import tls
from flashpoint_server.config.files import Files
from flashpoint_server.config.settings import Settings
from flashpoint_server.http import closing
from flashpoint_server.http.ending import Config
from flashpoint_server.http.envelope import Envelope, refuse_outside
from flashpoint_server.http.half_closed import HalfClosed
from flashpoint_server.http.protocol import HttpProtocol
from flashpoint_server.http.request import Request
from flashpoint_server.oip import routes as oip
from flashpoint_server.refusal import Refusal

MOST = 256  # connections at a time; more wait in the backlog
PAUSE = 0.1  # seconds until the next try to accept one of them

log = structlog.stdlib.get_logger("flashpoint.supervisor")


class StandIn:
    """Refuses every request with 503: `not_ready`, and `draining` after `drain`."""

    def __init__(self, settings: Settings, files: Files, listener: socket.socket) -> None:
        self._listener = listener
        self._files = files
        self._state = ServerState()
        self._on = False
        self._refusal = "not_ready", "no HTTP process is alive: the server starts another"
        self._config = config = Config(
            Envelope(_nothing, (), (), check=self._refuse, writers={"v2": oip.written}),
            log_config=None, access_log=False, server_header=False, proxy_headers=False, lifespan="off", ws="none",
            http=HttpProtocol, timeout_keep_alive=settings.keep_alive,
        )  # fmt: skip
        config.header_timeout = settings.header_timeout
        config.answer_timeout = 2 * settings.body_timeout
        config.refuse, config.half_closed = partial(refuse_outside, lambda *_: None), HalfClosed()
        config.load()

    def look(self, *, needed: bool) -> None:
        """Accept connections while `needed`."""
        if needed == self._on:
            return
        self._on = needed
        if needed:
            self._listener.setblocking(False)
            self._listen()
            if self._refusal[0] == "not_ready":
                log.error("no HTTP process is alive", answer=503)
        else:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _listen(self) -> None:
        if self._on:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def drain(self) -> None:
        """Answer `draining` from now on."""
        self._refusal = "draining", "the server is shutting down"

    async def close(self) -> None:
        """Accept and answer what waits in the backlog, and let no new connection be established."""
        closing.refuse_new(self._listener)
        self.look(needed=True)
        await closing.drained([self._listener])
        self.look(needed=False)
        if tasks := set(self._state.tasks):  # connections, in their TLS handshake, and requests
            await asyncio.wait(tasks, timeout=closing.GRACE)
        await closing.close(self._state.connections)  # type: ignore[arg-type]

    def _refuse(self, request: Request, _: str | None) -> None:
        code, detail = self._refusal
        raise Refusal(code, detail, headers={"Connection": "close"})

    def _accept(self) -> None:
        try:
            if len(self._state.connections) >= MOST:
                raise OSError(errno.EMFILE, "too many connections")
            connection, _ = self._listener.accept()
        except BlockingIOError:  # another process has accepted it
            return
        except OSError:  # no room, or no descriptor is free: connections wait in the backlog
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(PAUSE, self._listen)
            return
        connection.setblocking(False)
        task = asyncio.ensure_future(self._serve(connection))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        certificate = self._files.contents.certificate
        how: dict[str, Any] = {} if certificate is None else {"ssl": tls.context(certificate)}
        make = partial(HttpProtocol, config=self._config, server_state=self._state, app_state={}, _loop=loop)
        try:
            await loop.connect_accepted_socket(make, connection, **how)
        except OSError:  # the client has left, or its handshake failed
            connection.close()


async def _nothing(_: Scope, __: Receive, ___: Send) -> None:
    raise AssertionError("every request is refused before")
