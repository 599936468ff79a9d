"""Manage the attempts of one call: its deadline, its retries and its answer. This module does no I/O.

`Client` and `AsyncClient` drive an `Exchange`. They only send, read and sleep, and call its methods:

    request()      returns what to send
    begin(…)       takes the status and the fields of the answer
    space()        returns memory for the next bytes of the answer; filled(n) says how many came
    answer()       returns the result after the last byte
    failed(…)      takes an error, and returns the seconds to sleep before the next request()
"""

from __future__ import annotations

import email.utils
import functools
import random
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import httpx

from flashpoint._calls.service import Answer, Call, Reader
from flashpoint._http.http1 import CLOSED, USES_TLS
from flashpoint._http.proxies import AUTHENTICATION
from flashpoint._http.readers import Document, Message
from flashpoint.errors import (
    AuthenticationError,
    ConnectionFailedError,
    DeadlineExceededError,
    FlashpointError,
    OverloadedError,
    ProtocolError,
    from_problem,
)
from flashpoint.meta import read_meta
from flashpoint_contract import wire

FIRST_DELAY = 0.1  # seconds; doubled at each retry
LONGEST_DELAY = 10.0
SPREAD = 0.5  # most seconds beyond `Retry-After`: callers that a full server refused at once must not return at once
MOST_RETRY_AFTER = 1_000_000  # seconds; the longest timeout; a longer `Retry-After` is reduced to this
# httpx copies each piece that it sends, and copies the rest again if the piece does not fit into the buffer of the
# socket. So parts are sent in pieces that fit.
PIECE = 256 * 1024

REPLICA = "X-Flashpoint-Replica"
# Finds the path of an endpoint at the end of the client's URL, which should be the server's root.
_ENDPOINT = re.compile(r"/(attention(/grad)?|verify|benchmark|caches|saved|info|metrics|docs|v2|health(/\w+)?)/?$")
_PROBLEM = "application/problem+json"  # the media type of every error of Flashpoint
# An error of another media type comes from a proxy whose server died. Nginx answers 502, Ray Serve 500.
_BROKEN_BEHIND = (500, 502)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)
# How TLS reports an answer that is not TLS; OpenSSL has several names for it.
_NO_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
# How TLS reports that the server closed the connection during the handshake.
_NO_HANDSHAKE = ("EOF", "Connection reset", "Broken pipe")


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a request: the parts of its message, not copied. It can be sent repeatedly."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def _pieces(self) -> Iterator[memoryview]:
        for part in self._exchange.call.body:
            for start in range(0, part.nbytes, PIECE):
                self._exchange.tick()
                yield part[start : start + PIECE]

    def __iter__(self) -> Iterator[memoryview]:  # type: ignore[override]  # httpx accepts any bytes-like object
        return self._pieces()

    async def __aiter__(self) -> AsyncIterator[memoryview]:  # type: ignore[override]
        for piece in self._pieces():
            yield piece


class Exchange:
    """The state of one `Call` until its answer, its deadline or its last retry; or until `stop` becomes readable."""

    def __init__(
        self, call: Call[Any], *, timeout: float | None, retries: int, stop: socket.socket | None = None
    ) -> None:
        self.call = call
        self._stop = stop
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._retries = retries
        self._failures = 0
        self._failure: FlashpointError | None = None  # error of the last attempt
        self._moved = False  # whether this exchange has sent the call again to the replica that holds its caches
        self._timeouts: dict[str, float | None] = {}
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._reader: Reader = Document()
        self._url = httpx.URL()  # URL of the last attempt

    def remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one. Raises DeadlineExceededError if it has passed."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError("the timeout passed before the answer had come")
        return left

    def tick(self) -> None:
        """Set httpx's timeouts to the time that is left. httpx applies the whole timeout to each single wait."""
        left = self.remaining()
        self._timeouts.update(dict.fromkeys(self._timeouts, left))

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Return the request of the next attempt. After the deadline, raise the last attempt's error, or a timeout."""
        try:
            left = self.remaining()
        except DeadlineExceededError as late:
            raise self._failure or late from None
        headers = {**_trace_headers(), **self.call.headers, "Content-Length": str(self.call.size)}
        if left is not None:
            headers["X-Timeout-Ms"] = str(max(1, int(left * 1000)))
        if self.call.affinity is not None and self.call.affinity.replica:
            headers[REPLICA] = self.call.affinity.replica
        self._timeouts = httpx.Timeout(left).as_dict()
        # Our own transport reads the extensions except `timeout`. Other transports read `timeout` and the stream.
        extensions = {
            "timeout": self._timeouts, "parts": self.call.body, "deadline": self._deadline, "stop": self._stop
        }  # fmt: skip
        method, url, body = self.call.method, _target(http.base_url, self.call.path), Body(self)
        self._url = url
        if http.cookies:  # a balancer sets cookies
            headers["Cookie"] = httpx.Request("GET", url, cookies=http.cookies).headers.get("cookie", "")
        merged = [(b"Host", url.netloc), *_merged(http.headers.raw, headers)]
        request = httpx.Request(method, url, headers=merged, stream=body, extensions=extensions)
        self._timeouts = request.extensions["timeout"]
        return request

    def begin(self, response: httpx.Response) -> None:
        """Store the status and the headers of the answer, and choose the reader of its body."""
        self.tick()
        self._status, self._headers = response.status_code, response.headers
        length = response.headers.get("content-length", "")
        media = _media_type(response.headers)
        if self._status == self.call.success and media != self.call.expected:
            raise ProtocolError(
                f"an answer of type {media or 'unknown'}", status=self._status, request_id=self._request_id
            )
        self._reader = Document()
        if self._status == self.call.success and self.call.reader is not None:
            self._reader = self.call.reader()
        elif self._status == self.call.success and media == wire.MEDIA_TYPE:
            self._reader = Message(int(length) if length.isdecimal() else None)

    def space(self) -> memoryview:
        """Return the memory for the next bytes of the answer. It is never empty."""
        return self._reader.space()

    def minimum(self, space: memoryview) -> int:
        """Return how many bytes to wait for, if the answer goes on: 1 for server-sent events, else all of `space`."""
        return len(space) if self.call.reader is None else 1

    def filled(self, count: int) -> None:
        """Pass `count` bytes, which were written into `space()`, to the reader."""
        self._reader.filled(count)

    def feed(self, chunk: bytes) -> None:
        """Pass `chunk`, bytes of the answer, to the reader. Used by transports that cannot read into `space()`."""
        self.tick()
        rest = memoryview(chunk)
        while rest:
            space = self.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            self.filled(count)
            rest = rest[count:]

    def answer(self) -> Any:
        """Return the call's result once the whole answer has been read. Raises the error that the server answered."""
        received = self._reader.finish()
        if self._status in _BROKEN_BEHIND and _media_type(self._headers) != _PROBLEM:
            raise ConnectionFailedError(f"the connection broke behind a proxy, which answered {self._status}")
        if self._status == 407:
            raise AuthenticationError(AUTHENTICATION, status=407)
        if 300 <= self._status < 400 and (location := self._headers.get("location")):
            raise ProtocolError(self._redirected(location), status=self._status, request_id=self._request_id)
        if self._status in (404, 405) and _ENDPOINT.search(base := str(self._url).removesuffix(self.call.path)):
            detail = received.get("detail") or "there is no such path"
            root = _ENDPOINT.sub("", base)
            received = {**received, "detail": f"{detail}; url must be the server's root, {root}, not {base}"}
        if self._status != self.call.success:
            retry_after = _retry_after(self._headers)
            error = from_problem(self._status, received, request_id=self._request_id, retry_after=retry_after)
            if self.call.ignored(error):
                return None
            raise error
        if self.call.affinity is not None and (replica := self._headers.get(REPLICA)):
            self.call.affinity.replica = replica
        if not isinstance(self._reader, Message):
            return self.call.read(received)
        head, buffer = received
        meta = read_meta(self._headers, wire.decode_options(head.metadata), self._failures)
        return self.call.read(Answer(head, buffer, meta))

    def _moves(self, error: Exception) -> bool:
        """Return whether to send the call to the replica that this answer names: at most once."""
        affinity, named = self.call.affinity, self._headers.get(REPLICA, "")
        elsewhere = isinstance(error, FlashpointError) and error.code == "cache_elsewhere"
        if affinity is None or not elsewhere or self._moved or named in ("", affinity.replica):
            return False
        affinity.replica, self._moved = named, True
        return True

    def _redirected(self, location: str) -> str:
        """Return the error text for a redirect. The text contains the target address without its credentials."""
        try:
            to = str(self._url.join(location).copy_with(userinfo=b""))
        except httpx.InvalidURL:
            return "the server redirects to an address that is not valid"
        base = to.removesuffix(self.call.path)
        return f"the server redirects to {to}, and redirects are not followed: make the client with the URL {base}"

    @property
    def _request_id(self) -> str | None:
        return self._headers.get("x-request-id")

    def failed(self, error: Exception) -> float:
        """Return the seconds to sleep before the next attempt. If there is none, raise the error for the caller."""
        if isinstance(error, httpx.TransportError):
            error = _translated(error, self._url)
        if self._moves(error):
            return 0.0
        if isinstance(error, FlashpointError) and (other := self.call.instead(error)) is not None:
            self.call = other
            return 0.0
        if not isinstance(error, (OverloadedError, ConnectionFailedError)) or self._failures >= self._retries:
            raise error
        sent = isinstance(error, ConnectionFailedError) and not isinstance(error.__cause__, _NOT_SENT)
        if sent and not self.call.repeatable:
            raise error  # the server may have executed the call, although no answer came
        left = None if self._deadline is None else self._deadline - time.monotonic()
        delay = pause(self._failures, error.retry_after, left)
        self._failures, self._failure = self._failures + 1, error
        if left is not None and delay >= left:
            raise error  # no time is left for a retry; this error says more than a timeout
        return delay


@functools.lru_cache(maxsize=1024)
def _target(base: httpx.URL, path: str) -> httpx.URL:
    """Return the URL of a path below `base`, as httpx joins them. Cached, because httpx is slow."""
    return base.copy_with(raw_path=base.raw_path + httpx.URL(path).raw_path.lstrip(b"/"))


def _merged(defaults: Iterable[tuple[bytes, bytes]], headers: Mapping[str, str]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers of a client and of a call. A header of the call replaces the client's."""
    encoded = {name.lower(): (name.encode("ascii"), value.encode("utf-8")) for name, value in headers.items()}
    yield from (one for one in defaults if one[0].lower().decode("ascii") not in encoded)
    yield from encoded.values()


def backoff(failures: int) -> float:
    """Return seconds to wait: FIRST_DELAY doubled `failures` times, at most LONGEST_DELAY, times a random 0.5 to 1."""
    return min(FIRST_DELAY * 2.0 ** min(failures, 64), LONGEST_DELAY) * random.uniform(0.5, 1.0)


def pause(failures: int, asked: float | None, left: float | None) -> float:
    """Return seconds to wait: `backoff`, and the seconds that the server asked for with a random part of SPREAD.

    The random part takes at most half of the time that is `left` (seconds; None without a deadline) after them.
    """
    if asked is None:
        return backoff(failures)
    room = SPREAD if left is None else min(SPREAD, max(0.0, (left - asked) / 2))
    return max(backoff(failures), asked + random.uniform(0.0, room))


def _translated(error: httpx.TransportError, url: httpx.URL) -> FlashpointError:
    translated: FlashpointError
    server = f"{url.scheme}://{url.netloc.decode('ascii')}"
    if isinstance(error, httpx.ConnectTimeout):
        translated = ConnectionFailedError(f"the deadline passed before there was a connection to {server}")
    elif "CERTIFICATE_VERIFY_FAILED" in str(error):
        translated = ConnectionFailedError(
            f"the certificate of {server} is not trusted; set SSL_CERT_FILE to the PEM file of its authority: {error}"
        )
    elif isinstance(error, httpx.ProxyError) and AUTHENTICATION in str(error):
        translated = AuthenticationError(str(error), status=407)
    elif isinstance(error, _BROKEN):
        translated = ConnectionFailedError(_broken(str(error) or type(error).__name__, url.scheme, server))
    elif isinstance(error, httpx.TimeoutException):
        translated = DeadlineExceededError("the timeout passed before the answer had come")
    else:
        translated = ProtocolError(f"the request could not be made: {error or type(error).__name__}")
    translated.__cause__ = error
    return translated


def _broken(failure: str, scheme: str, server: str) -> str:
    """Return the error text for a connection that failed with the text `failure`; it names possible causes."""
    if any(each in failure for each in _NO_TLS):
        return f"{server} does not use TLS: begin its address with http://, or give the port at which it serves HTTPS"
    if USES_TLS in failure:
        return f"{server} uses TLS: begin its address with https://"
    text = f"the connection to {server} failed: {failure}"
    if scheme == "http":
        hung_up = CLOSED in failure or "Connection reset" in failure
        return text + ("; if it uses TLS, begin its address with https://" if hung_up else "")
    if any(each in failure for each in _NO_HANDSHAKE):
        text += "; if it does not use TLS, begin its address with http://"
    # TLS 1.3 has an alert for a missing certificate, but a server under asyncio closes the connection without it.
    elif "CERTIFICATE_REQUIRED" in failure or CLOSED in failure:
        text += "; if it asks for a client certificate, give `tls`, an ssl.SSLContext that has loaded one"
    return text


def _media_type(headers: Mapping[str, str]) -> str:
    """Return the media type of an answer in lower case, without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of the `Retry-After` header, which is a number or a date; None without a valid one."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdecimal():
        seconds = float(value)  # infinity for a number that is too large
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError, IndexError):
            return None
    return min(max(0.0, seconds), MOST_RETRY_AFTER)


def _trace_headers() -> dict[str, str]:
    """Return `traceparent` and the other headers of the caller's trace (W3C Trace Context), if there is one."""
    if "opentelemetry.trace" not in sys.modules:  # the caller has no span; OpenTelemetry may not be installed
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers
