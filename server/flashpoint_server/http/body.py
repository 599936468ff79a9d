"""Read a request's body and send its answer, within limits of size and time, and without copies if possible.

ASGI passes a body in chunks that have been copied twice. Our own server (protocol.py) avoids this: when a route has
read the head of its message, the transport writes the rest of the body directly into the route's memory, and the HTTP
parser does not see it. An answer is sent in one write, from the memory into which it was computed. A route does both
with the `Direct` in the scope's extension `EXTENSION`. Other ASGI servers lack the extension: there, routes read ASGI
messages and send copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import httptools
import numpy as np
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from flashpoint_contract.wording.sizes import in_bytes
from flashpoint_server.config.settings import Settings
from flashpoint_server.refusal import Refusal, out_of_time

if TYPE_CHECKING:
    from flashpoint_server.http.ending import EndingProtocol

EXTENSION = "flashpoint.direct"

T = TypeVar("T")

Part = bytes | memoryview  # a part of an answer's body

MOST_AT_ONCE = 1 << 20  # maximum bytes of one read, so that a large body does not delay other connections for long
# Maximum bytes of one write over TLS. Encrypting them takes half a millisecond and blocks all other connections.
ENCRYPTED_AT_ONCE = 1 << 20
_SCRATCH = memoryview(bytearray(MOST_AT_ONCE))  # target of unwanted bytes; nothing reads it
# Seconds between a timeout and its effect. A delayed event loop runs its timers before it reads its sockets, which may
# already have the awaited data.
GRACE = 0.02

# If a refused body has at most this many bytes left, the server reads and discards them to keep the connection open.
# This costs less than a new connection, and most clients send the whole body before they read the answer.
NEARLY = 1 << 20

DRAIN_SECONDS = 20.0  # how long a refused client may continue to send before the connection is closed


class ClientGoneError(Exception):
    """The client has disconnected, so no answer is sent."""


class RequestBody:
    """The body of one request, read in chunks or directly into memory. Times are in `time.monotonic` seconds."""

    received = 0  # number of bytes read
    deadline: float | None = None  # deadline of the request
    complete = False  # whether the whole body has arrived
    ended: float | None = None  # when the whole body had arrived
    _draining: Direct | None = None  # set when a direct read has begun; `drain` uses it

    def __init__(self, scope: Scope, receive: Receive, headers: Mapping[str, str], settings: Settings) -> None:
        self._receive = receive
        # Only our own server (protocol.py) has `direct`. It refers to the scope, so remove it from the scope: otherwise
        # they would be a reference cycle, which only the garbage collector frees.
        self.direct: Direct | None = scope.get("extensions", {}).pop(EXTENSION, {}).get("direct")
        self._settings = settings
        self._began = time.monotonic()
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdecimal() else None  # None: a chunked body
        self.absent = not length and "transfer-encoding" not in headers  # no body (RFC 9112, §6.3)
        self.limit = settings.body_limit  # maximum number of bytes

    @property
    def nearly_there(self) -> bool:
        """Whether the rest of a refused body is so short that the server discards it and keeps the connection."""
        if self.direct is None or self._draining is not None or self.length is None:
            return False
        return self.direct.invited and self.length - self.received <= NEARLY

    def check_length(self, length: int | None) -> None:
        """Raise Refusal 413 if `length` exceeds the limit."""
        if length is not None and length > self.limit:
            raise Refusal(
                "body_too_large", f"the body of {in_bytes(length)} exceeds the limit of {in_bytes(self.limit)}"
            )

    async def next(self) -> bytes:
        """Return the next chunk; b"" at the end of the body. Raises Refusal (408, 413, 504) and ClientGoneError."""
        if self.complete:
            return b""
        if self.direct is not None and (chunk := self.direct.early()):
            self._see_end(self.direct.ended)
            return self._took(chunk)
        end = self._patience(time.monotonic())
        for left in (end - time.monotonic(), GRACE):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return self._took(await self._chunk())
        raise self._too_late(end)

    @contextlib.contextmanager
    def watching(self, gone: Callable[[], None]) -> Iterator[None]:
        """Call `gone` if the client disconnects inside the block. The whole body must have arrived."""
        if self.direct is not None:
            self.direct.watch(gone)
            try:
                yield
            finally:
                self.direct.unwatch()
            return

        async def listen() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone()

        listening = asyncio.ensure_future(listen())
        try:
            yield
        finally:
            listening.cancel()

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Once the body has arrived, cancel it if the client disconnects.

        Raises ClientGoneError in this case.
        """
        if not (self.complete or self.absent):
            return await work
        task, left = asyncio.ensure_future(work), False

        def leave() -> None:
            nonlocal left
            left = True
            task.cancel()

        with self.watching(leave):
            try:
                return await task
            except asyncio.CancelledError:
                if left:
                    raise ClientGoneError from None
                raise

    def _see_end(self, ended: bool) -> None:
        if ended:
            self.complete, self.ended = True, time.monotonic()

    def _took(self, chunk: bytes) -> bytes:
        self.received += len(chunk)
        self.check_length(self.received)
        return chunk

    def _patience(self, last: float) -> float:
        """Return when the next bytes are due, if the last ones arrived at `last`. Both are `time.monotonic` seconds.

        The body may pause for `body_timeout`, and it may be that many seconds later than `body_rate` requires.
        """
        due = min(last, self._began + self.received / self._settings.body_rate) + self._settings.body_timeout
        return due if self.deadline is None else min(due, self.deadline)

    def _too_late(self, end: float) -> Refusal:
        if end == self.deadline:
            return out_of_time()
        pause, rate = self._settings.body_timeout, self._settings.body_rate
        rule = f"it may pause for {pause:g} s, and must average {rate} bytes a second"
        return Refusal("body_timeout", f"the body arrived too slowly: {rule}")

    async def text(self) -> bytes | memoryview:
        """Return the whole body. Nothing of it may have been read before. Raises like `next`."""
        if self.direct is not None and self.length is not None:
            self.check_length(self.length)
            place = np.empty(self.length, np.uint8)  # the system provides its pages as the bytes arrive
            await self.into([place.data], b"")
            return place.data
        text = bytearray()
        while chunk := await self.next():
            text += chunk
        return bytes(text)

    async def into(self, places: Iterable[memoryview], head: bytes) -> None:
        """Copy `head` and then the rest of the body into `places`. `head` holds the last bytes that `next` returned.

        On our own server the data goes directly from the socket into `places`; on others, chunk by chunk. Raises like
        `next`, and Refusal 400 if the data has not exactly the total size of `places`.
        """
        waiting = BodyBuffer(places)
        if len(head) > waiting.left:
            raise _too_long()
        waiting.copy(memoryview(head))
        if self.direct is not None and self.length is not None and self.length - self.received == waiting.left:
            if not self.complete:
                await self._receive_directly(self.direct, waiting)
            return
        while chunk := await self.next():
            if len(chunk) > waiting.left:
                raise _too_long()
            waiting.copy(memoryview(chunk))
        if waiting.left:
            raise Refusal("malformed_body", "the body ends before the end of its last tensor")

    async def _receive_directly(self, direct: Direct, places: BodyBuffer) -> None:
        before, began = self.received - places.filled_bytes, time.monotonic()
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()  # done when the whole body has arrived or its time is over
        timer: asyncio.TimerHandle | None = None

        def look(again: Callable[..., None], grace: float = GRACE) -> None:
            # `again` is `look` itself. If `look` used its own name here, its closure would be a reference cycle, which
            # only the garbage collector frees.
            nonlocal timer
            self.received = before + places.filled_bytes
            due = self._patience(max(began, places.filled_last))
            if (left := due - time.monotonic()) > 0:
                timer = loop.call_later(left, again, again)
            elif grace:
                timer = loop.call_later(grace, again, again, 0.0)
            elif not over.done():
                over.set_exception(self._too_late(due))

        def end(received: asyncio.Future[None]) -> None:
            received.exception()  # mark the exception as retrieved: nobody reads it if the body was too late
            if not over.done():
                over.set_result(None)

        self._draining = direct
        try:
            received = direct.receive(places)
            if not received.done():
                received.add_done_callback(end)
                look(look)
                await over
            received.result()
            self.received = before + places.filled_bytes
            self._see_end(True)
        except ConnectionError:
            raise ClientGoneError from None
        finally:
            if timer is not None:
                timer.cancel()
            places.discard()  # missing bytes must not be written later: the memory may then belong to another request

    async def _chunk(self) -> bytes:
        while not self.complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self._see_end(not message.get("more_body", False))
            if chunk := message.get("body", b""):
                return bytes(chunk)
        return b""

    async def drain(self) -> None:
        """Read and discard the rest of the body, for at most DRAIN_SECONDS.

        TCP resets a connection that is closed with unread bytes, and the client then loses the answer.
        """
        with contextlib.suppress(ClientGoneError, TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                if self._draining is not None:
                    await self._draining.drain()
                while self._draining is None and not self.complete:
                    await self._chunk()


async def copy(place: memoryview, data: memoryview) -> None:
    """Copy `data` into `place`, MOST_AT_ONCE bytes at once: meanwhile, the event loop does other work."""
    for start in range(0, len(data), MOST_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        place[start : start + MOST_AT_ONCE] = data[start : start + MOST_AT_ONCE]


def _too_long() -> Refusal:
    return Refusal("malformed_body", "the body is longer than its head says")


class BodyBuffer:
    """The memory of a body's tensors, which arriving bytes fill in order."""

    filled_bytes = 0
    filled_last = 0.0  # when the last bytes arrived, in `time.monotonic` seconds
    _unwanted = 0  # number of bytes to discard

    def __init__(self, places: Iterable[memoryview]) -> None:
        self._places = [place for place in places if len(place)]
        self._places.reverse()

    @property
    def full(self) -> bool:
        return not self._places and not self._unwanted

    @property
    def left(self) -> int:
        """The number of bytes that have not arrived yet, including those that will be discarded."""
        return sum(map(len, self._places)) + self._unwanted

    def next(self) -> memoryview:
        """Return the memory for the next bytes, of at most MOST_AT_ONCE."""
        return self._places[-1][:MOST_AT_ONCE] if self._places else _SCRATCH[: self._unwanted]

    def filled(self, n: int) -> None:
        """Record that `n` bytes were written into `next()`."""
        self.filled_bytes += n
        self.filled_last = time.monotonic()
        if not self._places:
            self._unwanted -= n
            return
        rest = self._places.pop()[n:]
        if len(rest):
            self._places.append(rest)

    def copy(self, data: memoryview) -> None:
        while len(data):
            place = self._places[-1]
            n = min(len(place), len(data))
            place[:n] = data[:n]
            self.filled(n)
            data = data[n:]

    def discard(self) -> None:
        """Release the memory. The missing bytes are discarded when they arrive."""
        self._unwanted, self._places = self.left, []


class Direct:
    """Direct reads and writes for one request whose head has arrived, beside ASGI's `receive` and `send`."""

    def __init__(self, http: EndingProtocol) -> None:
        self._http = http
        self._cycle = http.cycle
        self._received: asyncio.Future[None] | None = None

    def receive(self, places: BodyBuffer) -> asyncio.Future[None]:
        """Read into `places` the part of the body that was not delivered yet. `places` must have exactly its size.

        Return a future that is done when the whole body has arrived. It raises ConnectionError if the client
        disconnects first.
        After `places.discard()`, the rest of the body is discarded when it arrives (see `drain`).
        """
        http, cycle = self._http, self._cycle
        self._received = received = http.loop.create_future()
        places.copy(memoryview(self.early()))  # bytes that arrived with the head and are already parsed
        if places.full:
            received.set_result(None)
        elif self.gone:
            received.set_exception(ConnectionError("the client disconnected"))
        else:
            if cycle.waiting_for_100_continue:
                http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                cycle.waiting_for_100_continue = False
            switch_state(http, BodyReceiver(http, places, received))
        return received

    async def drain(self) -> None:
        """Wait until the rest of the body has arrived, after a `receive` whose places were discarded."""
        if self._received is not None:
            await asyncio.wait({self._received})

    def early(self) -> bytes:
        """Return the bytes of the body that the parser has read and that were not delivered yet."""
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
        """Whether the client has disconnected. If so, tell uvicorn, which would otherwise answer 500."""
        if self._http.transport.is_closing():
            self._cycle.disconnected = True
        return self._cycle.disconnected

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client disconnects, or now if it already has. `unwatch` ends this.

        The body must have arrived. If the client has already sent its next request, its disconnection is not noticed.
        """
        http = self._http
        if self.gone:
            gone()
        http.watcher = gone
        if not (http.half_closed or http.pipeline):
            http.flow.resume_reading()  # without reading, the disconnection would not be noticed

    def unwatch(self) -> None:
        self._http.watcher = None

    async def answer(self, fields: Iterable[tuple[bytes, bytes]], parts: list[Part], seconds: float) -> bool:
        """Send status 200 with the header `fields` and `parts`. After `seconds`, abort the connection.

        Return False in this case, else True, also if the client has disconnected. When this returns, the transport
        refers to no memory of `parts`. `fields` must contain Content-Length.
        """
        http, cycle = self._http, self._cycle
        if self.gone:
            return True
        cycle.response_started = True
        lines = [b"%s: %s\r\n" % field for field in (*cycle.default_headers, *fields, *persistence(cycle))]
        head = b"".join((STATUS_LINE[200], *lines, b"\r\n"))
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
        """Return True when the transport has sent everything. At `end`, abort the connection and return False."""
        http = self._http
        for seconds in (end - http.loop.time(), GRACE):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await http.flow.drain()
                    return True
        # `abort` takes effect later in the event loop. Until then the transport uses the memory of the answer, so wait.
        http.transport.abort()
        await http.flow.drain()
        return False


def pieces(parts: list[Part]) -> Iterator[list[Part]]:
    """Yield `parts` in pieces of at most ENCRYPTED_AT_ONCE bytes: TLS encrypts each piece at once, into new memory."""
    if sum(map(len, parts)) <= ENCRYPTED_AT_ONCE:
        yield parts
        return
    for part in parts:
        for start in range(0, len(part), ENCRYPTED_AT_ONCE):
            yield [part[start : start + ENCRYPTED_AT_ONCE]]


def persistence(cycle: RequestResponseCycle) -> list[tuple[bytes, bytes]]:
    """Return the Connection header field as a list; an empty list if the HTTP version implies its value."""
    if not cycle.keep_alive:
        return [(b"connection", b"close")]
    return [(b"connection", b"keep-alive")] if cycle.scope["http_version"] == "1.0" else []


class ConnectionState(asyncio.BufferedProtocol):
    """The transport's protocol in one state of a connection. It reads data; `http` handles all other events."""

    def __init__(self, http: EndingProtocol) -> None:
        self._http = http

    def eof_received(self) -> bool | None:
        return None  # closes the transport: half a body is not a request

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()


class BodyReceiver(ConnectionState):
    """The state in which the bytes of a body are read directly into `places`."""

    def __init__(self, http: EndingProtocol, places: BodyBuffer, received: asyncio.Future[None]) -> None:
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
        # The parser has not seen this body and would wait for it, so a new parser reads the next request.
        http.parser = new_parser(http)
        http.cycle.more_body = False
        switch_state(http, http.parsing)
        if not self._received.done():
            self._received.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut()
        super().connection_lost(exc)

    def cut(self) -> None:
        """Tell the route that the rest of the body will not come, or that it cannot answer any more."""
        if not self._received.done():
            self._received.set_exception(ConnectionError("the client disconnected"))


def new_parser(http: EndingProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(http)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn's own parser: see its __init__
    return parser


def switch_state(http: EndingProtocol, protocol: asyncio.BufferedProtocol) -> None:
    """Replace the transport's protocol. Only after a pause does the transport read with the new one."""
    http.flow.resume_reading()
    http.transport.pause_reading()
    http.transport.set_protocol(protocol)
    http.transport.resume_reading()
