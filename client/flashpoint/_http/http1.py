"""One HTTP/1.1 exchange without I/O: the request's bytes, and the answer's as they arrive. h11 does the heads.

Where the answer has a Content-Length, its body goes past h11, from the socket into the caller's own memory; a chunked
body, or one that ends with its connection, goes through h11 and is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import h11
import httpx

HEAD_LIMIT = 100 * 1024  # bytes of an answer's head
PACKET = 64 * 1024  # bytes up to which the parts of a request are sent together


def packets(head: bytes, parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """A request as it is sent: big parts from their own memory, small ones joined, so that a small call is one."""
    joined = bytearray(head)
    for part in parts:
        if len(joined) + len(part) > PACKET:
            yield memoryview(joined)
            joined = bytearray()
        if len(part) > PACKET:
            yield part
        else:
            joined += part
    yield memoryview(joined)


class Reply:
    """The answer to `request`: `receive` what arrives until it has `begun`, then `take` its body until it is `done`.

    `left` is how many bytes are still to come where that is known: these may be read into their final place, and
    subtracted here. Otherwise it is None and all bytes go through `receive`. Raises httpx's protocol errors.
    """

    def __init__(self, request: httpx.Request) -> None:
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        self._no_body = request.method == "HEAD"
        self._keep_alive = False
        self._ended = False
        self._arrived = bytearray()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.left: int | None = None
        try:
            asked = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
            self.request_head = self._h11.send(asked) or b""
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error), request=request) from error

    @property
    def begun(self) -> bool:
        """Whether status and headers are here."""
        return self.status != 0

    @property
    def done(self) -> bool:
        """Whether all of the answer has been taken."""
        return not self._arrived and (self._ended if self.left is None else self.left == 0)

    @property
    def reusable(self) -> bool:
        """Return whether the connection may carry another exchange, if this request has been sent completely."""
        return self._keep_alive and self.done

    def receive(self, data: bytes) -> None:
        """Bytes as they came; none when the server has closed the connection."""
        if not data and not self.begun:
            raise httpx.RemoteProtocolError("the server closed the connection without an answer")
        try:
            self._h11.receive_data(data)
            while not self._ended and self.left is None:
                event = self._h11.next_event()
                if event is h11.NEED_DATA:
                    break
                if isinstance(event, h11.Response):
                    self._begin(event)
                elif isinstance(event, h11.Data):
                    self._arrived += event.data
                elif isinstance(event, h11.EndOfMessage):
                    self._ended = True
                    self._keep_alive &= self._h11.their_state is h11.DONE and not self._h11.trailing_data[0]
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error

    def _begin(self, head: h11.Response) -> None:
        self.status, self.headers = head.status_code, list(head.headers.raw_items())
        found = dict(head.headers)  # h11 has lower-cased the names, and let only one Content-Length through
        tokens = {token.strip().lower() for token in found.get(b"connection", b"").split(b",")}
        self._keep_alive = head.http_version == b"1.1" and b"close" not in tokens
        if self._no_body or self.status in (204, 304):
            length = 0
        elif b"transfer-encoding" in found or b"content-length" not in found:
            return
        else:
            length = int(found[b"content-length"])
        data = self._h11.trailing_data[0]
        self._keep_alive &= len(data) <= length
        self._arrived += data[:length]
        self.left = length - len(self._arrived)

    def take(self, view: memoryview) -> int:
        """Move body bytes that have arrived into `view` (flat bytes); how many."""
        count = min(len(view), len(self._arrived))
        view[:count] = self._arrived[:count]
        del self._arrived[:count]
        return count
