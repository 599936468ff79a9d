"""A body that comes compressed, and is inflated as it comes: bounded, like any other, in what it amounts to."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping

from starlette.types import Receive, Scope

from flashpoint_server.config.settings import Settings
from flashpoint_server.http.body import RequestBody
from flashpoint_server.refusal import Refusal

WINDOW_BITS = {"gzip": 31, "deflate": 15}  # as zlib counts: with gzip's wrapping, and with zlib's own
AT_ONCE = 1 << 17  # bytes inflated before others get their turn


class InflatedBody(RequestBody):
    """As `RequestBody`, of the bytes within. `limit` holds for what comes, and for what that amounts to."""

    def __init__(
        self, scope: Scope, receive: Receive, headers: Mapping[str, str], settings: Settings, coding: str
    ) -> None:
        super().__init__(scope, receive, headers, settings)
        self.length = None  # of what is within: nobody says it
        self._zlib = zlib.decompressobj(WINDOW_BITS[coding])
        self._held = b""  # has come, and is not inflated yet
        self._within = False  # zlib may hold more than it gave
        self._inflated = 0

    async def next(self) -> bytes:
        while not self._zlib.eof:
            if not self._held and not self._within:
                self._held = await super().next()
                if not self._held:
                    raise Refusal("malformed_body", "the compressed body ends too soon")
            try:
                piece = self._zlib.decompress(self._held, AT_ONCE)
            except zlib.error as error:
                raise Refusal("malformed_body", f"the body is not what its content coding says: {error}") from None
            self._held, self._within = self._zlib.unconsumed_tail, len(piece) == AT_ONCE
            self._inflated += len(piece)
            self.check_length(self._inflated)
            if piece:
                await asyncio.sleep(0)
                return piece
        if self._zlib.unused_data or await super().next():
            raise Refusal("malformed_body", "the body goes on behind the end of what is compressed")
        return b""
