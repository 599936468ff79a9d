"""A compressed body. It is decompressed as it arrives; the limit also applies to the decompressed size."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping

from starlette.types import Receive, Scope

from flashpoint_server.config.settings import Settings
from flashpoint_server.http.body import RequestBody
from flashpoint_server.refusal import Refusal

WINDOW_BITS = {"gzip": 31, "deflate": 15}  # zlib's `wbits` for each content coding; deflate is zlib's own format
AT_ONCE = 1 << 17  # maximum bytes to decompress at once, because other requests wait meanwhile


class InflatedBody(RequestBody):
    """Like `RequestBody`, with decompressed bytes. `limit` applies to the compressed and to the decompressed size."""

    def __init__(
        self, scope: Scope, receive: Receive, headers: Mapping[str, str], settings: Settings, coding: str
    ) -> None:
        super().__init__(scope, receive, headers, settings)
        self.length = None  # the decompressed length is unknown
        self._zlib = zlib.decompressobj(WINDOW_BITS[coding])
        self._compressed = b""  # arrived, but not decompressed
        self._within = False  # whether zlib may have more output without more input
        self._inflated = 0

    async def next(self) -> bytes:
        while not self._zlib.eof:
            if not self._compressed and not self._within:
                self._compressed = await super().next()
                if not self._compressed:
                    raise Refusal("malformed_body", "the compressed body is incomplete")
            try:
                piece = self._zlib.decompress(self._compressed, AT_ONCE)
            except zlib.error as error:
                raise Refusal("malformed_body", f"the body does not have its content coding: {error}") from None
            self._compressed, self._within = self._zlib.unconsumed_tail, len(piece) == AT_ONCE
            self._inflated += len(piece)
            self.check_length(self._inflated)
            if piece:
                await asyncio.sleep(0)
                return piece
        if self._zlib.unused_data or await super().next():
            raise Refusal("malformed_body", "the body continues after the end of its compressed data")
        return b""
