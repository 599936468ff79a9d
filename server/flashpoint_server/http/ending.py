"""End a connection, after an answer or after input that the HTTP parser cannot read.

The parser cannot continue after an error. The cause may be ours: if one of our callbacks fails, for example for lack of
memory, httptools raises its own error, with ours as its context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, cast

import httptools
import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from flashpoint_server.http.half_closed import HalfClosed
from flashpoint_server.http.loop import Loop
from flashpoint_server.refusal import Refusal

# After the last answer, the connection is closed after these seconds, or when the client has sent this many bytes.
LINGER, DISCARDED = 5.0, 8 << 20
MALFORMED = "malformed"  # the route under which metrics count input that is not an HTTP request

log = structlog.stdlib.get_logger("flashpoint.http")


class Config(uvicorn.Config):
    """uvicorn's configuration, with timeouts in seconds for a request's head and for a client that reads nothing."""

    header_timeout = 10.0
    answer_timeout = 20.0
    # Returns the id of a request that no route can answer, and the bytes of its answer. Its arguments are the scope, or
    # None for input that is not a request; the error; and the route under which metrics count it, "" if they do not.
    refuse: Callable[[MutableMapping[str, Any] | None, Refusal, str], tuple[str, bytes]]
    half_closed: HalfClosed
    loop_class = Loop

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        return partial(self.loop_class, self.header_timeout)


class EndingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which ends connections so that clients receive the last answer."""

    config: Config
    secure: bool  # whether the connection uses TLS
    parsing: asyncio.BufferedProtocol  # the state in which the HTTP parser gets every read
    wrong: Refusal | None = None  # the error of a head that the parser accepts, but that is not valid
    last_answer = b""  # the error answer that ends the connection, if the rest of the input cannot be parsed
    over = False  # whether sending has ended: further input is discarded
    discarded = 0  # number of input bytes that were discarded
    running: RequestResponseCycle | None = None  # the request that is being answered, or the last one
    # Number of bytes read since the last end of a head or the last bytes of a body. They can be parts of a head, chunk
    # extensions, trailers and blank lines.
    unparsed_bytes = 0
    half_closed = False  # whether the client has ended its sending
    watcher: Callable[[], None] | None = None  # called when the client disconnects

    def refuse_input(self, error: Exception) -> None:
        """Refuse the request in which an error occurred, and end the connection.

        Earlier requests are answered first. All further input is discarded.
        """
        cycle, running = self.cycle, self.running
        unfinished = cycle is not None and cycle.more_body
        if unfinished and cycle.response_complete:  # the error is in the rest of a body whose request was answered
            self.linger()
            return
        cause = _cause_of(error)
        refusal = self.wrong or _refusal_of(cause, in_body=unfinished)
        ours = refusal.code in ("out_of_memory", "internal_error")
        unseen = not unfinished or cycle is not running  # no route has received this request, so it is counted here
        route = ("other" if ours else MALFORMED) if unseen else ""
        request_id, self.last_answer = self.config.refuse(_scope(cycle) if unfinished else None, refusal, route)
        if ours:
            log.error("failed", request_id=request_id, error=type(cause).__name__, exc_info=cause)
        elif unseen:
            log.warning(
                "malformed request",
                request_id=request_id,
                peer=self.client and f"{self.client[0]}:{self.client[1]}",
                status=refusal.status,
                code=refusal.code,
                reason=self.wrong.detail if self.wrong else str(error),
            )
        if unfinished and running is not None and cycle is not running:
            self.forget_last(running)
        elif unfinished and cycle.response_started:
            self.linger()
        elif unfinished:
            # the next two lines tell the route that reads the body: no more data comes, and no answer can be sent
            cycle.disconnected = True
            cycle.message_event.set()
            self._send_last_answer()
        if running is None or running.response_complete:
            self._send_last_answer()

    def _send_last_answer(self) -> None:
        self.transport.write(self.last_answer)
        self.linger()

    def end(self) -> None:
        """End the connection after an answer."""
        running = self.running
        if self.pipeline or self.flow.read_paused or running is None or running.more_body:
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        """Stop sending, and discard input until the client closes the connection, at most LINGER s and DISCARDED bytes.

        TCP resets a connection that is closed with unread bytes, and the client can then lose the last answers. A TLS
        connection cannot be closed in one direction only, so it is closed at once, unless the client is sending a body:
        it finds `Connection: close` in the answer.
        """
        self.over = True
        sending = self.running is not None and self.running.more_body
        if self.transport.is_closing() or (self.secure and not sending):
            self.transport.close()
            return
        if not self.secure:
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER, self.transport.close)

    def cut(self) -> bool:
        """End the connection of a server that stops. Return whether no request is left without an answer.

        A request without an answer gets 503 `draining`, in the place of the one that its route would send.
        """
        running = self.running
        if self.over or self.transport.is_closing():
            return True
        unfinished = running is not None and not running.response_complete
        began = unfinished and running is not None and running.response_started
        if began or not (unfinished or self.unparsed_bytes):
            self.transport.close()
            return self.idle
        refusal = Refusal("draining", "the server stopped before it could answer this request: send it again")
        scope = _scope(running) if unfinished and running is not None else None
        request_id, text = self.config.refuse(scope, refusal, MALFORMED if scope is None else "")
        self.transport.write(text)
        if unfinished and running is not None:
            self.linger()
            running.disconnected = True  # its route can send nothing more
            running.message_event.set()
            self.leave_body()
        else:
            log.warning("request cut", request_id=request_id, status=refusal.status, code=refusal.code)
            self.linger()
        return True

    def leave_body(self) -> None:
        """Tell the route that receives a body directly that it cannot answer any more."""
        raise NotImplementedError

    def keep_no_longer(self) -> None:
        """Close the connection after the answer to the present request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    @property
    def idle(self) -> bool:
        """Whether the connection has had an answer, and no byte of another request has arrived."""
        running = self.running
        return running is not None and running.response_complete and not self.unparsed_bytes and not self.pipeline

    def discard(self, nbytes: int) -> None:
        """Count `nbytes` of discarded input. Close the connection if the total exceeds DISCARDED."""
        self.discarded += nbytes
        if self.discarded > DISCARDED:
            self.transport.close()

    def forget_last(self, running: RequestResponseCycle) -> None:
        """Drop the last request of the pipeline, whose body is not complete."""
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else running


def _scope(cycle: RequestResponseCycle) -> MutableMapping[str, Any]:
    return cast(MutableMapping[str, Any], cycle.scope)  # the library's type is narrower


def _cause_of(error: Exception) -> Exception:
    """Return the exception of our callback if it caused the parser's `error`, else `error`."""
    if isinstance(error, httptools.HttpParserCallbackError) and isinstance(error.__context__, Exception):
        return error.__context__
    return error


def _refusal_of(cause: Exception, *, in_body: bool) -> Refusal:
    """Return the answer to input that cannot be parsed. `in_body` says whether the input is a body."""
    if isinstance(cause, MemoryError):
        return Refusal("out_of_memory", "the HTTP process ran out of memory for this request")
    if not isinstance(cause, (httptools.HttpParserError, ValueError)):  # ValueError: the path is not ASCII
        return Refusal("internal_error", "the server failed: a bug, logged with this request's id")
    if in_body:
        return Refusal("malformed_body", "the chunks of the body are not valid HTTP/1.1")
    return Refusal("malformed_head", "the request is not valid HTTP/1.1")
