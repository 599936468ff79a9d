"""uvicorn's HTTP protocol with a way for a body to go from the socket straight to where it is wanted.

ASGI hands a body over in pieces that were copied twice by then. Here a route that has read the head of its message asks
for the rest to be received into memory of its own (`DirectBody.into`): until that many bytes have come, the transport
reads into that memory and HTTP's parser sees none of them. Routes reach it by the scope's extension `EXTENSION`, which
has the `body` and a call that drops the connection, `abort`; on any other server the extension is missing, and they
read ASGI messages and send copies.

States of a connection: parsing (`_Parsing`) → receiving (`_Receiver`) → parsing.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flashpoint_server.places import Places

EXTENSION = "flashpoint.direct_body"

# Bytes of one read for the parser. What it sees of a body is copied several times on its way: let it be little.
PARSED_AT_ONCE = 1 << 15
_SCRATCH = memoryview(bytearray(PARSED_AT_ONCE))  # of all connections: what is read is copied before the next read


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol; `set_write_buffer_limits(high=0)` makes `send` return when the transport holds no bytes.

    That is what lets memory be reused under an answer: uvloop keeps views, not copies, of what it has not sent yet.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self.parsing = _Parsing(self)
        _switch(self, self.parsing)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.scope["extensions"] = {EXTENSION: {"body": DirectBody(self), "abort": self.transport.abort}}


class DirectBody:
    """The body of one request with a Content-Length."""

    def __init__(self, http: HttpProtocol) -> None:
        self._http = http
        self._cycle = http.cycle
        self._done: asyncio.Future[None] | None = None

    async def into(self, places: Places) -> None:
        """Receive the rest of the body, all that ASGI's `receive` has not handed over, into `places` of that size.

        Raises ConnectionError when the client goes first. Who gives up on it says `places.discard()`: what still comes
        is then thrown away, see `drain`.
        """
        http, cycle = self._http, self._cycle
        early, cycle.body = cycle.body, bytearray()  # came behind the head, and is parsed already
        places.copy(memoryview(early))
        if not places.full:
            if cycle.disconnected or http.transport.is_closing():
                raise ConnectionError("the client disconnected")
            if cycle.waiting_for_100_continue:
                http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                cycle.waiting_for_100_continue = False
            self._done = http.loop.create_future()
            _switch(http, _Receiver(http, places, self._done))
            await asyncio.shield(self._done)
            if not places.full:
                raise ConnectionError("the client disconnected")
        if not cycle.disconnected:
            cycle.message_event.clear()  # the next message that `receive` waits for is the disconnect

    async def drain(self) -> None:
        """After an `into` that was given up: wait until the rest of the body has come and been thrown away."""
        if self._done is not None:
            await asyncio.shield(self._done)


class _State(asyncio.BufferedProtocol):
    """The transport's protocol in one of the states: how it reads; all else is uvicorn's."""

    def __init__(self, http: HttpProtocol) -> None:
        self._http = http

    def eof_received(self) -> None:
        return None  # closes the transport: half a body is no request

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()


class _Parsing(_State):
    """Every read goes through HTTP's parser."""

    def get_buffer(self, sizehint: int) -> memoryview:
        return _SCRATCH

    def buffer_updated(self, nbytes: int) -> None:
        self._http.data_received(bytes(_SCRATCH[:nbytes]))


class _Receiver(_State):
    """Every read lands in its place."""

    def __init__(self, http: HttpProtocol, places: Places, received: asyncio.Future[None]) -> None:
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
        # The parser still waits for this body: a fresh one takes the next request of the connection.
        http.parser = httptools.HttpRequestParser(http)
        http.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own: see its __init__
        http.cycle.more_body = False
        _switch(http, http.parsing)
        if not self._received.done():
            self._received.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._received.done():
            self._received.set_result(None)
        super().connection_lost(exc)


def _switch(http: HttpProtocol, protocol: _State) -> None:
    """Give the transport another protocol. It takes up how to read when it starts to: so pause, then resume."""
    http.flow.resume_reading()
    http.transport.pause_reading()
    http.transport.set_protocol(protocol)
    http.transport.resume_reading()
