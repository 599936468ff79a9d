"""A minimal Python HTTP server: an asyncio.BufferedProtocol on uvloop that runs torch's operator in the event loop.

`python bare_protocol.py PORT`
"""

from __future__ import annotations

import asyncio
import sys

import torch
import uvloop
from op import attend, pack, unpack

_HEAD = 1 << 16  # largest size of a request's head in bytes


class Protocol(asyncio.BufferedProtocol):
    """One connection: for each request, read the head, read the body into a buffer of exactly its size, and answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._begin()

    def _begin(self) -> None:
        self._buffer, self._filled, self._in_body = bytearray(_HEAD), 0, False

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if not self._in_body:
            end = self._buffer.find(b"\r\n\r\n", 0, self._filled) + 4
            if end < 4:
                return
            headers = dict(line.lower().split(b":", 1) for line in bytes(self._buffer[: end - 4]).split(b"\r\n")[1:])
            body = bytearray(int(headers[b"content-length"]))
            self._filled -= end
            body[: self._filled] = self._buffer[end : end + self._filled]
            self._buffer, self._in_body = body, True
        if self._filled == len(self._buffer):
            answer = pack(attend(unpack(self._buffer)))
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer))
            self._transport.write(answer)
            self._begin()


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main())
