"""Check requests from browsers: the Host field, and the site whose page sends the request.

A page of any site can send requests to this machine. A site can also make its own name resolve to 127.0.0.1 (DNS
rebinding). The browser then treats this server as a part of that site, and only the Host field shows the difference.
Both kinds of requests are refused before their body is read.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from flashpoint_server.config.hosts import host_name, is_loopback
from flashpoint_server.config.settings import Settings
from flashpoint_server.http.body import EXTENSION
from flashpoint_server.http.request import Request
from flashpoint_server.refusal import Refusal

_PAGES = ("/", "/docs", "/docs/errors")  # pages to which other sites may link
_BOTH = ("X-Request-Id", "Inference-Header-Content-Length")
_SENT = (
    *_BOTH, "Authorization", "X-Timeout-Ms", "X-Priority", "Idempotency-Key", "X-Flashpoint-Replica", "Last-Event-ID",
    "traceparent", "tracestate", "baggage",
)  # fmt: skip
_SHOWN = (
    *_BOTH, "X-Backend", "X-Kernel", "X-Batch-Size", "Server-Timing", "Retry-After", "X-Flashpoint-Replica", "Location",
)  # fmt: skip


class OriginPolicy:
    """The host names that the server accepts, and the origins whose pages may call it.

    `names` is the value of `--allowed-hosts`; if it is empty, all names are allowed until `only_loopback` is called.
    `origins` is the value of `--cors-origins`.
    """

    def __init__(self, names: Collection[str], origins: Collection[str]) -> None:
        self._every_name = not names or "*" in names
        self._names = frozenset(name.lower() for name in names if not name.startswith("*"))
        self._endings = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._any_origin = "*" in origins
        self._origins = frozenset(origins)
        self._named = bool(names)

    def only_loopback(self) -> None:
        """Allow only loopback names and `names`. For a server on loopback that does not authenticate callers."""
        self._every_name = self._every_name and self._named

    def check(self, request: Request, here: str | None) -> None:
        """Raise Refusal 421 if the Host field is not allowed, and 403 if the page that sent the request is not allowed.

        `here` is the server's address of this connection.
        """
        headers = request.headers
        host = headers.get("host")
        if host is not None:
            self._check_host(host, here)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if (site is not None or origin is not None) and not self._welcome(request, site, origin, host):
            raise Refusal(
                "cross_site",
                f"a browser sent this request for a page of another site (origin {origin!r}): start the server with "
                "--cors-origins (FLASHPOINT_CORS_ORIGINS), which lists the allowed origins",
            )

    def _check_host(self, host: str, here: str | None) -> None:
        """Raise Refusal 421 if the host is not allowed. The address `here` is allowed: only names can be rebound."""
        name = host_name(host) or ""
        allowed = self._every_name or name in self._names or name.endswith(self._endings) or is_loopback(name)
        # An IPv4 connection to a socket of IPv6 has an address such as ::ffff:10.0.0.7.
        if not allowed and (here is None or name.strip("[]") != here.removeprefix("::ffff:")):
            raise Refusal(
                "host_not_allowed",
                f"the server does not accept the host {name!r}: use a loopback name, for example localhost, or start "
                "the server with --allowed-hosts (FLASHPOINT_ALLOWED_HOSTS), which lists the accepted hosts",
            )

    def _welcome(self, request: Request, site: str | None, origin: str | None, host: str | None) -> bool:
        """Return whether the request comes from our own page, from no page, or from an origin that CORS allows.

        Browsers send no Sec-Fetch-Site over plain HTTP to a host that is not localhost. But they send Origin with every
        request that could do harm.
        """
        if site in ("same-origin", "none"):
            return True
        if self._any_origin or origin in self._origins:
            return True
        if site is None:
            return origin is not None and origin.partition("://")[2].lower() == (host or "").lower()
        by_link = request.headers.get("sec-fetch-mode") == "navigate"
        return by_link and request.method == "GET" and request.path in _PAGES


class Cors(CORSMiddleware):
    """Starlette's middleware, which lets pages of allowed origins call the server. It does not allow cookies."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=_SENT,
            expose_headers=_SHOWN,
        )

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        scope.get("extensions", {}).pop(EXTENSION, None)  # a direct answer would not contain the CORS headers
        await super().simple_response(scope, receive, send, request_headers)
