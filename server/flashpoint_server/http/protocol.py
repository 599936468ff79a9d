"""uvicorn's HTTP protocol, extended by zero-copy bodies and answers.

ASGI passes a body in chunks that have been copied twice. With this protocol, a route that has read the head of its
message receives the rest into its own memory (`Direct.receive`): until that many bytes have arrived, the transport
reads into this memory, and the HTTP parser sees none of them. An answer is sent in one write from the memory into which
it was computed (`Direct.answer`). Routes find this in the scope's extension `EXTENSION`. Other servers do not have the
extension; there, routes read ASGI messages and send copies.

States of a connection: parsing (`_Parsing`) → receiving (`_Receiver`) → parsing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from flashpoint_server.exchange import FIELDS, combined
from flashpoint_server.http.body_buffer import BodyBuffer, Part, pieces
from flashpoint_server.http.ending import Closing, EndingProtocol
from flashpoint_server.http.heads import HEAD_BYTES, too_large, with_host_of, wrong
from flashpoint_server.http.persistence import answering, persistence
from flashpoint_server.refusal import Refusal

EXTENSION = "flashpoint.direct"

# Maximum bytes of one read for the parser. The parser copies its part of a body several times, so this is small.
PARSED_AT_ONCE = 1 << 15
_SCRATCH = memoryview(bytearray(PARSED_AT_ONCE))  # shared by all connections: data is copied before the next read
# An event loop that had to wait for a core runs its timers before it reads its sockets: late data may already be there.
GRACE = 0.02  # seconds to check for that data


class HttpProtocol(EndingProtocol):
    """uvicorn's protocol; `set_write_buffer_limits(high=0)` pauses the writer while the transport holds any byte.

    So the memory of an answer can be reused when the writer resumes: uvloop keeps views, not copies, of unsent data.
    `unparsed_bytes` counts the bytes that the parser has read since the last end of a head, or bytes of a body: parts
    of a head, chunk extensions, trailers and blank lines. Their number is limited, and so is the time for a head.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        # Per-connection state
        self.parsing = _Parsing(self)
        self.half_closed = False
        self.over = False
        self.last_words = b""
        self.discarded = 0
        self.running: RequestResponseCycle | None = None
        self.closing: Closing  # made with the transport
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None  # in the loop's seconds; None while a request arrives or is answered
        # The head of the last request and its fields: most requests of a connection have the same head.
        self._head: tuple[str, bytes, list[tuple[bytes, bytes]]] | None = None
        self._fields: Mapping[str, str] = {}

        # Per-request state; `scope`, `url`, `headers` and `cycle` are uvicorn's
        self.unparsed_bytes = 0
        self.wrong: Refusal | None = None
        self.watcher: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The kernel closes the connection if the client acknowledges nothing for this time (man 7 tcp).
        patience = int(1000 * self.config.answer_timeout)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
        transport.set_write_buffer_limits(high=int(self.secure))  # TLS pauses at `high`, plain TCP above it
        self.closing = Closing(self)
        self._await_head()
        _switch(self, self.parsing)

    def check_limits(self) -> None:
        """Check the limits after a read that gave neither the end of a head nor bytes of a body."""
        if self.transport.is_closing():
            return
        if self.unparsed_bytes > HEAD_BYTES:
            self.wrong = too_large()
            self.refuse_input(ValueError("the head has no end"))
        elif self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.config.header_timeout, self._look_once_more)

    def _look_once_more(self) -> None:
        self._head_timer = self.loop.call_later(GRACE, self.transport.abort)

    def _head_is_there(self) -> None:
        self.unparsed_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes | memoryview) -> None:
        self._unset_keepalive_if_required()
        if self.over or self.last_words:
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
            self.flow.pause_reading()  # one chunk at a time: a body that a route receives directly must not be parsed

    def _parse(self, data: bytes | memoryview) -> bytes:
        """Parse data, and return the bytes to parse next: a head with an Upgrade field, without the field (RFC 9110,
        §7.8).

        The parser would treat the bytes after this head as another protocol, and would lose a body.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if (method := self.parser.get_method()) == b"CONNECT":
                raise httptools.HttpParserError("CONNECT is not supported") from None
            line = b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())
            fields = [b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            self.parser = _parser(self)
            return b"".join((line, *fields, b"\r\n", data[upgrade.args[0] :]))
        return b""

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the head is parsed again: see `_parse`
        self._head_is_there()
        version = self.parser.get_http_version()
        if not self.url.startswith(b"/"):
            self.headers[:] = with_host_of(self.url, self.headers)
        head = version, self.url, self.headers
        if head != self._head:
            if refusal := wrong(version, self.url, self.headers):
                self.wrong = refusal
                raise ValueError(refusal.code)  # the parser turns it into its own error
            self._head = version, self.url, list(self.headers)  # a copy: trailers will be appended to the list
            self._fields = combined(self.headers)
        self.scope[FIELDS] = self._fields  # type: ignore[literal-required]  # not ASGI's
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.keep_alive = self.parser.should_keep_alive()
            self.cycle.waiting_for_100_continue = False  # HTTP/1.0 does not have it (RFC 9110, §10.1.1)
        self.cycle.transport = self.closing  # type: ignore[assignment]  # it has what the library uses
        self.scope["extensions"] = {EXTENSION: {"direct": Direct(self)}}

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False  # also of a request that was answered early

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.over or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.last_words:
            self._send_last_words()
        else:
            self._idle_since = self.loop.time()
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_whether_idle)
        if self.pipeline:
            self.flow.pause_reading()  # answer pipelined requests before more is read; otherwise they accumulate here

    def _unset_keepalive_if_required(self) -> None:
        """Called when data arrives: the connection is not idle. One timer serves many requests."""
        self._idle_since = None

    def _look_whether_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since is not None and not self.transport.is_closing():
            if (left := self._idle_since + self.timeout_keep_alive - self.loop.time()) > 0:
                self._idle_timer = self.loop.call_later(left, self._look_whether_idle)
            else:
                self.transport.close()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.unparsed_bytes = 0
        if self.cycle.response_complete:
            self._await_head()  # no route reads the rest

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = answering(app, cycle)  # type: ignore[arg-type, assignment]  # the library's types are narrower
        super()._start_asgi_task(cycle, app)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open for pending answers, after the client has ended its sending."""
        running = self.running
        if self.secure or running is None or running.response_complete or running.more_body:
            return False  # TLS has no half-closed connections
        try:
            self.config.half_closed.watch(self.transport.get_extra_info("socket"), self.transport.abort)
        except OSError:  # no descriptor is left to watch the connection
            return False
        self.half_closed = True
        if self.cycle is not running and self.cycle.more_body:
            self.forget_last(running)
        self.cycle.keep_alive = False
        self._ask_whether_there()
        return True

    def _ask_whether_there(self) -> None:
        """Write to a client that has ended its sending. One that has closed its connection answers with a reset.

        The written interim answer is skipped by every HTTP/1.1 client (RFC 9110, §15.2).
        """
        running = self.running
        if running is not None and not running.response_started and running.scope["http_version"] != "1.0":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.half_closed:
            self.config.half_closed.forget(self.transport.get_extra_info("socket"))
        if self.running is not None:
            self.running.disconnected = True  # uvicorn marks only the last request, which may wait behind this one
        super().connection_lost(exc)
        self._head_is_there()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self.watcher is not None:
            self.watcher()


class Direct:
    """One request after its head: direct reads and writes beside ASGI's `receive` and `send`."""

    def __init__(self, http: HttpProtocol) -> None:
        self._http = http
        self._cycle = http.cycle
        self._received: asyncio.Future[None] | None = None

    def receive(self, places: BodyBuffer) -> asyncio.Future[None]:
        """Receive the rest of the body, which ASGI's `receive` has not delivered, into `places` of that size.

        The future is done when all has arrived; it raises ConnectionError if the client disconnects first. A reader
        that gives up calls `places.discard()`: the rest is then discarded (see `drain`).
        """
        http, cycle = self._http, self._cycle
        self._received = received = http.loop.create_future()
        places.copy(memoryview(self.early()))  # arrived with the head and is already parsed
        if places.full:
            received.set_result(None)
        elif self.gone:
            received.set_exception(ConnectionError("the client disconnected"))
        else:
            if cycle.waiting_for_100_continue:
                http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                cycle.waiting_for_100_continue = False
            _switch(http, _Receiver(http, places, received))
        return received

    async def drain(self) -> None:
        """After an abandoned `receive`, wait until the rest of the body has arrived and has been discarded."""
        if self._received is not None:
            await asyncio.wait({self._received})

    def early(self) -> bytes:
        """Return the part of the body that has arrived but was not delivered yet."""
        early, self._cycle.body = self._cycle.body, bytearray()
        return bytes(early)

    @property
    def ended(self) -> bool:
        """Whether the whole body has arrived."""
        return not self._cycle.more_body

    @property
    def invited(self) -> bool:
        """Whether the client sends the body without waiting for 100 Continue (RFC 9110, §10.1.1)."""
        return not self._cycle.waiting_for_100_continue

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected. This also tells uvicorn, which would answer 500 otherwise."""
        if self._http.transport.is_closing():
            self._cycle.disconnected = True
        return self._cycle.disconnected

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client disconnects, at once if it already has, until `unwatch`. The body has arrived.

        If the client has already sent its next request, its disconnection is not noticed.
        """
        http = self._http
        if self.gone:
            gone()
        http.watcher = gone
        if not (http.half_closed or http.pipeline):
            http.flow.resume_reading()  # without reading, the disconnection would not be noticed

    def unwatch(self) -> None:
        self._http.watcher = None

    async def answer(self, status: int, headers: Mapping[str, str], parts: list[Part], seconds: float) -> bool:
        """Send the whole answer in one write. Return whether the client received it within `seconds`.

        When this returns, the transport holds no memory of `parts`. `headers` must be valid and contain the length.
        """
        http, cycle = self._http, self._cycle
        if self.gone:
            return True
        cycle.response_started = True
        named = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()
        first, last = ([b"%s: %s\r\n" % one for one in some] for some in (cycle.default_headers, persistence(cycle)))
        head = b"".join((STATUS_LINE[status], *first, named, *last, b"\r\n"))
        end = http.loop.time() + seconds
        for piece in pieces([head, *parts]) if http.secure else [[head, *parts]]:
            if http.transport.is_closing():
                return True
            http.transport.writelines(piece)
            if http.flow.write_paused and not await self._left(end):
                return False
        if not cycle.disconnected:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                http.end()
            cycle.on_response()
        return True

    async def _left(self, end: float) -> bool:
        """Wait until the transport has sent everything. At `end`, drop the connection and return False."""
        http = self._http
        for seconds in (end - http.loop.time(), GRACE):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await http.flow.drain()
                    return True
        http.transport.abort()  # takes effect in a later turn of the loop; until then the transport may still send
        await http.flow.drain()
        return False


class _State(asyncio.BufferedProtocol):
    """The transport's protocol in one of the states. It defines how to read; everything else is uvicorn's."""

    def __init__(self, http: HttpProtocol) -> None:
        self._http = http

    def eof_received(self) -> bool | None:
        return None  # closes the transport: half a body is not a request

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()


class _Parsing(_State):
    """The state in which every read goes through the HTTP parser."""

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH

    def buffer_updated(self, nbytes: int) -> None:
        http = self._http
        http.unparsed_bytes += nbytes
        http.data_received(_SCRATCH[:nbytes])
        if http.unparsed_bytes and not (http.over or http.last_words):
            http.check_limits()


class _Receiver(_State):
    """The state in which every read goes directly into `places`."""

    def __init__(self, http: HttpProtocol, places: BodyBuffer, received: asyncio.Future[None]) -> None:
        super().__init__(http)
        self._places = places
        self._received = received

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._places.next()

    def buffer_updated(self, nbytes: int) -> None:
        self._places.filled(nbytes)
        if not self._places.full:
            return
        http = self._http
        # The parser still waits for this body, so a new one parses the next request.
        http.parser = _parser(http)
        http.cycle.more_body = False
        _switch(http, http.parsing)
        if not self._received.done():
            self._received.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._received.done():
            self._received.set_exception(ConnectionError("the client disconnected"))
        super().connection_lost(exc)


def _parser(http: HttpProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(http)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn's own parser: see its __init__
    return parser


def _switch(http: HttpProtocol, protocol: _State) -> None:
    """Give the transport another protocol. Pausing and resuming makes the transport use the new read method."""
    http.flow.resume_reading()
    http.transport.pause_reading()
    http.transport.set_protocol(protocol)
    http.transport.resume_reading()
