"""uvicorn's HTTP protocol, with limits, and with bodies and answers that are not copied (`Direct` in body.py).

States of a connection: parsing (`_Parsing`) → receiving a body (`BodyReceiver` in body.py) → parsing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from types import SimpleNamespace

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from flashpoint_server.http.body import (
    EXTENSION,
    GRACE,
    BodyReceiver,
    ConnectionState,
    Direct,
    new_parser,
    persistence,
    switch_state,
)
from flashpoint_server.http.ending import EndingProtocol
from flashpoint_server.http.heads import HEAD_BYTES, too_large, with_host_of, wrong
from flashpoint_server.http.request import FIELDS, combined

# Maximum bytes of one read for the HTTP parser. It is small, because bytes of a body in such a read are copied twice.
PARSED_AT_ONCE = 1 << 15
_SCRATCH = memoryview(bytearray(PARSED_AT_ONCE))  # all connections share it: the parser copies its data at once


class HttpProtocol(EndingProtocol):
    """uvicorn's protocol, with direct reads and writes, and with limits of a head's size and time.

    uvloop keeps views of unsent data, not copies. The writer is paused while the transport holds any byte, so the
    memory of an answer can be reused when the writer resumes. `scope`, `url`, `headers` and `cycle` are uvicorn's.
    """

    # The transport for uvicorn's answers to ASGI messages. Its `close` lets the client read the last answer.
    closing: SimpleNamespace
    _head_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _idle_since: float | None = None  # in the loop's seconds; None while a request arrives or is answered
    # The last request's head and its parsed fields: most requests of a connection have the same head.
    _head: tuple[str, bytes, list[tuple[bytes, bytes]]] | None = None
    _fields: Mapping[str, str]
    _kept: list[tuple[bytes, bytes]]  # the fields that the routes get

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parsing = _Parsing(self)
        self.secure = self.scheme == "https"
        # The kernel closes the connection if the client acknowledges nothing for these milliseconds (man 7 tcp).
        patience = int(1000 * self.config.answer_timeout)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
        # Pause the writer at any unsent byte: TLS pauses at `high` bytes, plain TCP above `high` bytes.
        transport.set_write_buffer_limits(high=int(self.secure))
        self.closing = SimpleNamespace(write=transport.write, is_closing=transport.is_closing, close=self.end)
        self._await_head()
        switch_state(self, self.parsing)

    def check_limits(self) -> None:
        """Check the limits of a head, after a read that had neither the end of a head nor bytes of a body."""
        if self.transport.is_closing():
            return
        if self.unparsed_bytes > HEAD_BYTES:
            self.wrong = too_large()
            self.refuse_input(ValueError("the head has no end"))
        elif self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.config.header_timeout, self._abort_soon)

    def _abort_soon(self) -> None:
        self._head_timer = self.loop.call_later(GRACE, self.transport.abort)

    def _head_has_arrived(self) -> None:
        self.unparsed_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes | memoryview) -> None:
        self._unset_keepalive_if_required()
        if self.over or self.last_answer:
            self.discard(len(data))
            return
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError as error:
            self.refuse_input(error)
            return
        cycle = self.cycle
        if cycle is not None and cycle.body and cycle.more_body and not cycle.response_complete:
            self.flow.pause_reading()  # parse only one chunk: the route may want to receive the rest directly

    def _parse(self, data: bytes | memoryview) -> bytes:
        """Parse data and return b"". If a head has an Upgrade field, return the request without it, to be parsed again.

        A server may ignore this field (RFC 9110, §7.8), but the parser would treat a body as another protocol.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if (method := self.parser.get_method()) == b"CONNECT":
                raise httptools.HttpParserError("CONNECT is not supported") from None
            line = b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())
            fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            self.parser = new_parser(self)
            return b"".join((line, *fields, b"\r\n", data[upgrade.args[0] :]))
        return b""

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the head is parsed again, without the Upgrade field
        self._head_has_arrived()
        version = self.parser.get_http_version()
        if not self.url.startswith(b"/"):
            self.headers[:] = with_host_of(self.url, self.headers)
        head = version, self.url, self.headers
        if head != self._head:
            if refusal := wrong(version, self.url, self.headers):
                self.wrong = refusal
                raise ValueError(refusal.code)  # the parser turns it into its own error
            self._head = version, self.url, list(self.headers)  # a copy: the parser appends trailers to the list
            self._fields = combined(self.headers)
            # No route reads cookies, and Python's parser of them takes quadratic time before 3.11.10.
            self._kept = [field for field in self.headers if field[0] != b"cookie"]
        self.scope["headers"] = self._kept
        self.scope[FIELDS] = self._fields  # type: ignore[literal-required]  # not ASGI's
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.keep_alive = self.parser.should_keep_alive()
            self.cycle.waiting_for_100_continue = False  # HTTP/1.0 has no 100 Continue (RFC 9110, §10.1.1)
        self.cycle.transport = self.closing  # type: ignore[assignment]  # it has the methods that uvicorn uses
        self.scope["extensions"] = {EXTENSION: {"direct": Direct(self)}}

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False  # uvicorn leaves it True after an answer before the body

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.over or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.last_answer:
            self._send_last_answer()
        else:
            self._idle_since = self.loop.time()
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)
        if self.pipeline:
            self.flow.pause_reading()  # answer the pipelined requests before reading more, or they accumulate here

    def _unset_keepalive_if_required(self) -> None:
        """Record that the connection is not idle.

        uvicorn cancels its timer here. Our timer continues, and compares the idle time when it expires.
        """
        self._idle_since = None

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since is not None and not self.transport.is_closing():
            if (left := self._idle_since + self.timeout_keep_alive - self.loop.time()) > 0:
                self._idle_timer = self.loop.call_later(left, self._close_if_idle)
            else:
                self.transport.close()

    def leave_body(self) -> None:
        if isinstance(receiving := self.transport.get_protocol(), BodyReceiver):
            receiving.cut()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.unparsed_bytes = 0
        if self.cycle.response_complete:
            self._await_head()  # no route reads this body any more, so limit the time until the next head

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = answering(app, cycle)  # type: ignore[arg-type, assignment]  # the library's types are narrower
        super()._start_asgi_task(cycle, app)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Called when the client has ended its sending. Return whether to keep the connection open for an answer."""
        running = self.running
        if self.secure or running is None or running.response_complete or running.more_body:
            return False  # TLS has no half-closed connections; in the other cases, no complete request needs an answer
        try:
            self.config.half_closed.watch(self.transport.get_extra_info("socket"), self.transport.abort)
        except OSError:  # the system allows no more descriptors, which `watch` needs
            return False
        self.half_closed = True
        if self.cycle is not running and self.cycle.more_body:
            self.forget_last(running)
        self.cycle.keep_alive = False
        if not running.response_started and running.scope["http_version"] != "1.0":
            # A client that has closed its connection answers this with a reset. Every HTTP/1.1 client skips an interim
            # answer (RFC 9110, §15.2).
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self.half_closed:
            self.config.half_closed.forget(self.transport.get_extra_info("socket"))
        if self.running is not None:
            self.running.disconnected = True  # uvicorn marks only the last pipelined request
        super().connection_lost(exc)
        self._head_has_arrived()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self.watcher is not None:
            self.watcher()


class _Parsing(ConnectionState):
    """The state in which the HTTP parser gets every read."""

    _http: HttpProtocol

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH

    def buffer_updated(self, nbytes: int) -> None:
        http = self._http
        http.unparsed_bytes += nbytes
        http.data_received(_SCRATCH[:nbytes])
        if http.unparsed_bytes and not (http.over or http.last_answer):
            http.check_limits()


PROTOCOLS = (HttpProtocol, _Parsing, BodyReceiver)  # those that a transport has


def answering(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return `app`, wrapped so that its answers follow the rules of HTTP/1.0, which uvicorn does not implement.

    HTTP/1.0 has no chunks, so closing the connection ends an answer without a length. The server keeps the connection
    open only if the client requests it.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        endless = False

        async def send_sized(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                if endless := b"content-length" not in names:
                    cycle.keep_alive = cycle.chunked_encoding = False
                elif cycle.keep_alive and b"connection" not in names:
                    message["headers"] = [*message["headers"], *persistence(cycle)]
            elif endless:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks the body's length
            await send(message)

        await app(scope, receive, send_sized)

    return answer
