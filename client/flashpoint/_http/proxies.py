"""Connect through proxies from environment variables: HTTP proxies (also over TLS) and SOCKS 5."""

from __future__ import annotations

import base64
import ssl
import urllib.request
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import unquote

import h11
import httpx

from flashpoint._http.drive import Steps
from flashpoint._http.no_proxy import excepted

PORTS = {"http": 80, "https": 443}
_PROXY_PORTS = {**PORTS, "socks5": 1080, "socks5h": 1080}
_SOCKS = 5  # version of the protocol (RFC 1928)
_SOCKS_FAILURES = (
    "", "the proxy failed", "not allowed by its rules", "the network is unreachable", "the host is unreachable",
    "connection refused", "the TTL expired", "the command is not supported", "the address type is not supported",
)  # fmt: skip
AUTHENTICATION = "the proxy needs a user and a password: set them in the proxy's URL, http://USER:PASSWORD@HOST:PORT"


class _Pipe(Protocol):
    """The interface of a connection to a proxy, over which `Proxy.tunnel` requests a connection to the server."""

    def write(self, data: bytes) -> Steps[None]: ...

    def read(self, size: int) -> Steps[bytes]: ...


@dataclass(frozen=True)
class Proxy:
    """A proxy. Error texts and logs never contain `user` and `password`."""

    scheme: str
    host: str
    port: int
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    @property
    def forwards(self) -> bool:
        """Return whether this is an HTTP proxy, which can also forward requests without a tunnel."""
        return self.scheme in PORTS

    def __str__(self) -> str:
        return f"{self.scheme}://{authority(self.host, self.port)}"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header with the credentials for an HTTP proxy; empty without credentials."""
        if not self.user and not self.password:
            return []
        credentials = base64.b64encode(f"{self.user}:{self.password}".encode())
        return [(b"Proxy-Authorization", b"Basic " + credentials)]

    def tunnel(self, pipe: _Pipe, host: str, port: int) -> Steps[None]:
        """Ask the proxy for a connection to a server. Raises httpx.ProxyError."""
        return (_http_tunnel if self.forwards else _socks_tunnel)(self, pipe, host, port)


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def of_environment(url: httpx.URL) -> Proxy | None:
    """Return the proxy that the environment names for a server, or None. Raises ValueError if its URL is not valid."""
    environment = urllib.request.getproxies_environment()
    proxies = environment or urllib.request.getproxies()
    given = proxies.get(url.scheme) or proxies.get("all")
    host = url.raw_host.decode("ascii")
    port = url.port or PORTS[url.scheme]
    if not given or excepted(host, port):
        return None
    if not environment and urllib.request.proxy_bypass(authority(host, port)):  # the settings of macOS or Windows
        return None
    try:
        parsed = httpx.URL(given if "://" in given else f"http://{given}")
        known = parsed.scheme in _PROXY_PORTS and bool(parsed.host)
    except httpx.InvalidURL:
        known = False
    if not known:
        raise ValueError("must be a URL such as http://HOST:PORT, with http, https or socks5; the environment names it")
    user, _, password = parsed.userinfo.decode("ascii").partition(":")
    host = parsed.raw_host.decode("ascii")
    return Proxy(parsed.scheme, host, parsed.port or _PROXY_PORTS[parsed.scheme], unquote(user), unquote(password))


def _http_tunnel(proxy: Proxy, pipe: _Pipe, host: str, port: int) -> Steps[None]:
    target = authority(host, port).encode()
    protocol = h11.Connection(h11.CLIENT)
    headers = [(b"Host", target), (b"User-Agent", b"flashpoint"), *proxy.headers]
    yield from pipe.write(protocol.send(h11.Request(method=b"CONNECT", target=target, headers=headers)) or b"")
    try:
        while not isinstance(event := protocol.next_event(), h11.Response):
            # h11 cannot take bytes of the tunnel with the proxy's answer: in TLS the client sends first.
            if event is h11.NEED_DATA:
                protocol.receive_data((yield from _more(pipe)))
    except h11.RemoteProtocolError as error:
        raise httpx.ProxyError(f"it answered with no HTTP: {error}") from error
    if event.status_code == 407:
        raise httpx.ProxyError(f"407: {AUTHENTICATION}")
    if not 200 <= event.status_code < 300:
        raise httpx.ProxyError(f"{event.status_code} {event.reason.decode('ascii', 'replace')}".strip())


def _socks_tunnel(proxy: Proxy, pipe: _Pipe, host: str, port: int) -> Steps[None]:
    """Open a tunnel through a SOCKS 5 proxy (RFC 1928), with a password if there is one (RFC 1929)."""
    user, password = proxy.user.encode(), proxy.password.encode()
    methods = b"\x00\x02" if user else b"\x00"
    yield from pipe.write(bytes([_SOCKS, len(methods)]) + methods)
    version, method = yield from _exactly(pipe, 2)
    if version != _SOCKS:
        raise httpx.ProxyError("it does not speak SOCKS 5")
    if method == 2 and user:
        yield from pipe.write(b"\x01" + bytes([len(user)]) + user + bytes([len(password)]) + password)
        _, refused = yield from _exactly(pipe, 2)
        if refused:
            raise httpx.ProxyError("it refused the user and the password")
    elif method != 0:
        raise httpx.ProxyError(AUTHENTICATION)
    yield from pipe.write(bytes([_SOCKS, 1, 0]) + _socks_address(host) + port.to_bytes(2, "big"))
    _, failure, _, kind = yield from _exactly(pipe, 4)
    if failure:
        known = _SOCKS_FAILURES[failure] if failure < len(_SOCKS_FAILURES) else f"failure {failure}"
        raise httpx.ProxyError(known)
    (size,) = (yield from _exactly(pipe, 1)) if kind == 3 else ({1: 4, 4: 16}.get(kind, 4),)
    yield from _exactly(pipe, size + 2)


def _socks_address(host: str) -> bytes:
    try:
        address = ip_address(host)
    except ValueError:
        name = host.encode("ascii")
        return b"\x03" + bytes([len(name)]) + name
    return (b"\x01" if address.version == 4 else b"\x04") + address.packed


def _exactly(pipe: _Pipe, size: int) -> Steps[bytes]:
    data = b""
    while len(data) < size:
        data += yield from _more(pipe, size - len(data))
    return data


def _more(pipe: _Pipe, limit: int = 4096) -> Steps[bytes]:
    if not (data := (yield from pipe.read(limit))):
        raise httpx.ProxyError("it closed the connection")
    return data


class NestedTls:
    """TLS inside TLS, for an HTTPS server behind an HTTPS proxy. It has the methods of a non-blocking `SSLSocket`."""

    def __init__(self, outer: ssl.SSLSocket, context: ssl.SSLContext, host: str) -> None:
        self._outer = outer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._inner = context.wrap_bio(self._in, self._out, server_hostname=host)
        self._unsent = memoryview(b"")

    def do_handshake(self) -> None:
        while True:
            try:
                self._inner.do_handshake()
                return self._flush()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()

    def send(self, data: memoryview) -> int:
        self._flush()
        return self._inner.write(data[: 16 * 1024])  # `_flush` sends the bytes in the next call of any method

    def recv_into(self, view: memoryview) -> int:
        while True:
            self._flush()
            try:
                # With a buffer, `read` returns the number of bytes, although its annotation says bytes.
                return self._inner.read(len(view), view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._fill()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0

    def pending(self) -> int:
        """Return whether a method can make progress before more bytes arrive."""
        return len(self._unsent) or self._out.pending or self._inner.pending() or self._in.pending

    def close(self) -> None:
        self._outer.close()

    def _flush(self) -> None:
        while self._unsent or self._out.pending:
            self._unsent = self._unsent or memoryview(self._out.read())
            self._unsent = self._unsent[self._outer.send(self._unsent) :]

    def _fill(self) -> None:
        if data := self._outer.recv(64 * 1024):
            self._in.write(data)
        else:
            self._in.write_eof()
