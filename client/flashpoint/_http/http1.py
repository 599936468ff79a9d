"""Generate the bytes of an HTTP/1.1 request, and parse the bytes of its answer. This module does no I/O.

h11 writes and parses the heads. A body with a Content-Length does not pass through h11: it is read from the socket into
the caller's memory. A chunked body, or one that ends with the connection, passes through h11 and is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import h11
import httpx

from flashpoint._http.proxies import Proxy

HEAD_LIMIT = 100 * 1024  # largest head of an answer, in bytes
CLOSED = "the server closed the connection without an answer"
USES_TLS = "the server answered in TLS"
_TLS = (b"\x15\x03", b"\x16\x03")  # the beginning of a TLS record: an alert, or a handshake
PACKET = 64 * 1024  # join small parts of a request into packets of at most this number of bytes


def packets(head: bytes, parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the buffers to send. Large parts are not copied; small parts are joined, so a small call is one send."""
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
    """The answer to `request`: pass bytes to `receive` until it has `begun`, then `take` its body until it is `done`.

    If the length of the body is known, the caller may read its last `left` bytes from the socket without `receive`. It
    must then subtract their number from `left`. `proxy` is the proxy that forwards the request, if any. Raises httpx's
    protocol errors.
    """

    def __init__(self, request: httpx.Request, proxy: Proxy | None = None) -> None:
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        self._no_body = request.method == "HEAD"
        self._keep_alive = False
        self._ended = False
        self._arrived = bytearray()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.left: int | None = None  # bytes still to come; None if the body's length is not known
        target, headers = request.url.raw_path, request.headers.raw
        if proxy is not None:
            target, headers = b"http://" + request.url.netloc + target, [*headers, *proxy.headers]
        try:
            head = h11.Request(method=request.method, target=target, headers=headers)
            self.request_head = self._h11.send(head) or b""
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error), request=request) from error

    @property
    def begun(self) -> bool:
        return self.status != 0

    @property
    def done(self) -> bool:
        """Return whether the whole answer has been taken."""
        return not self._arrived and (self._ended if self.left is None else self.left == 0)

    @property
    def reusable(self) -> bool:
        """Return whether the connection may carry another exchange, if this request has been sent completely."""
        return self._keep_alive and self.done

    def receive(self, data: bytes) -> None:
        """Parse bytes from the connection; pass b"" if the server has closed it."""
        if not data and not self.begun:
            raise httpx.RemoteProtocolError(CLOSED)
        if data[:2] in _TLS and not self.begun:
            raise httpx.RemoteProtocolError(USES_TLS)
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
        headers = dict(head.headers)  # h11 makes the names lower-case, and refuses a second, different Content-Length
        tokens = {token.strip().lower() for token in headers.get(b"connection", b"").split(b",")}
        self._keep_alive = head.http_version == b"1.1" and b"close" not in tokens
        if self._no_body or self.status in (204, 304):
            length = 0
        elif b"transfer-encoding" in headers or b"content-length" not in headers:
            return
        else:
            length = int(headers[b"content-length"])
        data = self._h11.trailing_data[0]
        self._keep_alive &= len(data) <= length
        self._arrived += data[:length]
        self.left = length - len(self._arrived)

    def take(self, view: memoryview) -> int:
        """Move body bytes that have arrived into `view` (flat bytes). Return their number."""
        count = min(len(view), len(self._arrived))
        view[:count] = self._arrived[:count]
        del self._arrived[:count]
        return count
