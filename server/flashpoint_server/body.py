"""A request's body as it arrives: limited in size and in time, and drained when the request is refused early."""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.datastructures import Headers
from starlette.types import Receive

from flashpoint_server.refusal import Refusal, out_of_time
from flashpoint_server.settings import Settings

# How long a refused client may go on sending before the connection is closed on it.
DRAIN_SECONDS = 20.0


class ClientGoneError(Exception):
    """The client disconnected: there is nobody to answer."""


class Body:
    """The chunks of one body, in order.

    `length` is what Content-Length says, `limit` the most bytes that are read, `deadline` the request's own, in
    `time.monotonic` seconds; `complete` says that all of it has arrived.
    """

    def __init__(self, receive: Receive, headers: Headers, settings: Settings) -> None:
        self._receive = receive
        self._settings = settings
        self._began = time.monotonic()
        self._received = 0
        length = headers.get("content-length", "")
        self.length = int(length) if length.isdecimal() else None  # None where the body comes in chunks
        self.limit = settings.body_limit
        self.deadline: float | None = None
        self.complete = False

    def check_length(self, length: int | None) -> None:
        """Raises Refusal 413 where `length`, which somebody promises, is over the limit."""
        if length is not None and length > self.limit:
            raise Refusal("body_too_large", f"a body of {length} bytes is over the limit of {self.limit}")

    async def next(self) -> bytes:
        """The next chunk; empty when the body is at its end. Raises Refusal (408, 413, 504) and ClientGoneError."""
        if self.complete:
            return b""
        # A body may pause for `body_timeout`, and be late by as much against its least rate.
        allowed = self._settings.body_timeout
        patience = min(time.monotonic(), self._began + self._received / self._settings.body_rate) + allowed
        end = patience if self.deadline is None else min(patience, self.deadline)
        try:
            async with asyncio.timeout(end - time.monotonic()):
                chunk = await self._chunk()
        except TimeoutError:
            if end == self.deadline:
                raise out_of_time() from None
            raise Refusal("body_timeout", "the body came too slowly") from None
        self._received += len(chunk)
        self.check_length(self._received)
        return chunk

    async def _chunk(self) -> bytes:
        while not self.complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self.complete = not message.get("more_body", False)
            if chunk := message.get("body", b""):
                return bytes(chunk)
        return b""

    async def drain(self) -> None:
        """Throw away what is still to come, within a bound.

        Closing a connection with bytes unread resets it, and the client loses the answer it was sent.
        """
        with contextlib.suppress(ClientGoneError, TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.complete:
                    await self._chunk()
