"""The body of a request: limits of size and time, and draining when the request is refused early."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from starlette.types import Receive, Scope

from flashpoint_server.config.settings import Settings
from flashpoint_server.http.body_buffer import BodyBuffer
from flashpoint_server.http.protocol import EXTENSION, GRACE, Direct
from flashpoint_server.refusal import Refusal, out_of_time

# If no more than this remains of a refused body, the connection is kept. Most clients send the whole body before they
# read, and to discard it costs less than another connection.
NEARLY = 1 << 20  # bytes

# How long a refused client may continue to send before the connection is closed.
DRAIN_SECONDS = 20.0


class ClientGoneError(Exception):
    """The client has disconnected; nobody reads an answer."""


class RequestBody:
    """The body of one request, read in chunks or directly into memory.

    `length` is the Content-Length, `limit` the maximum number of bytes. `deadline` is that of the request, and `ended`
    the time when the whole body had arrived, both in `time.monotonic` seconds. `complete` says whether it has arrived,
    `absent` whether the request has none. `direct` is set only on our own server (protocol.py).
    """

    def __init__(self, scope: Scope, receive: Receive, headers: Mapping[str, str], settings: Settings) -> None:
        self._receive = receive
        # Taken out of the scope, to which it refers: a cycle of references would wait for the garbage collector.
        self.direct: Direct | None = scope.get("extensions", {}).pop(EXTENSION, {}).get("direct")
        self._draining: Direct | None = None
        self._settings = settings
        self._began = time.monotonic()
        self._received = 0
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdecimal() else None  # None: a chunked body
        self.absent = not length and "transfer-encoding" not in headers  # RFC 9112, §6.3
        self.limit = settings.body_limit
        self.deadline: float | None = None
        self.complete = False
        self.ended: float | None = None

    @property
    def received(self) -> int:
        """The number of bytes read."""
        return self._received

    @property
    def nearly_there(self) -> bool:
        """Whether the rest of the body is so small that the server keeps the connection and discards the rest."""
        if self.direct is None or self._draining is not None or self.length is None:
            return False
        return self.direct.invited and self.length - self._received <= NEARLY

    def check_length(self, length: int | None) -> None:
        """Raise Refusal 413 if `length` exceeds the limit."""
        if length is not None and length > self.limit:
            raise Refusal("body_too_large", f"the body of {length} bytes exceeds the limit of {self.limit}")

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

    def _see_end(self, there: bool) -> None:
        if there:
            self.complete, self.ended = True, time.monotonic()

    def _took(self, chunk: bytes) -> bytes:
        self._received += len(chunk)
        self.check_length(self._received)
        return chunk

    def _patience(self, last: float) -> float:
        """Return when the next bytes are due, if the last ones arrived at `last`. Both are `time.monotonic` seconds.

        A body may pause for `body_timeout`, and may be behind `body_rate` by the same time.
        """
        due = min(last, self._began + self._received / self._settings.body_rate) + self._settings.body_timeout
        return due if self.deadline is None else min(due, self.deadline)

    def _too_late(self, end: float) -> Refusal:
        if end == self.deadline:
            return out_of_time()
        pause, rate = self._settings.body_timeout, self._settings.body_rate
        said = f"it may pause for {pause:g} s, and must average {rate} bytes a second"
        return Refusal("body_timeout", f"the body arrived too slowly: {said}")

    async def into(self, places: Iterable[memoryview], head: bytes) -> None:
        """Read the rest of the body into `places`, which it must fill exactly. `head` is its beginning, already read.

        On our own server the data goes directly from the socket into `places`; on others, chunk by chunk. Raises like
        `next`, and Refusal 400 if the sizes differ.
        """
        waiting = BodyBuffer(places)
        if len(head) > waiting.left:
            raise _too_long()
        waiting.copy(memoryview(head))
        if self.direct is not None and self.length is not None and self.length - self._received == waiting.left:
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
        before, began = self._received - places.filled_bytes, time.monotonic()
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()  # received or given up
        timer: asyncio.TimerHandle | None = None

        def look(again: Callable[..., None], grace: float = GRACE) -> None:
            # `again` is this function: if it named itself, the cycle of references would wait for the garbage collector
            nonlocal timer
            self._received = before + places.filled_bytes
            due = self._patience(max(began, places.filled_last))
            if (left := due - time.monotonic()) > 0:
                timer = loop.call_later(left, again, again)
            elif grace:
                timer = loop.call_later(grace, again, again, 0.0)
            elif not over.done():
                over.set_exception(self._too_late(due))

        def end(received: asyncio.Future[None]) -> None:
            received.exception()  # mark the exception as retrieved: the caller has given up
            if not over.done():
                over.set_result(None)

        self._draining = direct
        try:
            received = direct.receive(places)
            received.add_done_callback(end)
            look(look)
            await over
            received.result()
            self._received = before + places.filled_bytes
            self._see_end(True)
        except ConnectionError:
            raise ClientGoneError from None
        finally:
            if timer is not None:
                timer.cancel()
            places.discard()  # what is missing, at once: the memory may belong to another request after this returns

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
        """Discard the rest of the body, for at most DRAIN_SECONDS.

        If a connection is closed with unread bytes, TCP resets it, and the client loses the answer.
        """
        with contextlib.suppress(ClientGoneError, TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                if self._draining is not None:
                    await self._draining.drain()
                while self._draining is None and not self.complete:
                    await self._chunk()


def _too_long() -> Refusal:
    return Refusal("malformed_body", "the body is longer than its head says")
