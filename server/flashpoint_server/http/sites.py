"""Check a browser's requests: the Host by which it calls this server, and the site whose page calls.

A page of any site can send requests to this machine, and a site can let its own name lead to 127.0.0.1 (DNS rebinding):
then the browser takes this server for that site, and only the Host field tells them apart. Both are refused before
anything of the request is read or computed.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from flashpoint_server.config.hosts import host_name, is_loopback
from flashpoint_server.config.settings import Settings
from flashpoint_server.exchange import Exchange
from flashpoint_server.http.protocol import EXTENSION
from flashpoint_server.refusal import Refusal

_MOST_KNOWN = 256  # Host fields that are remembered as allowed
_PAGES = ("/", "/docs", "/docs/errors")  # what a link of another site may lead to
_BOTH = ("X-Request-Id", "Inference-Header-Content-Length")
_SENT = (*_BOTH, "Authorization", "X-Timeout-Ms", "X-Priority", "Idempotency-Key", "X-Flashpoint-Replica")
_SHOWN = (*_BOTH, "X-Backend", "X-Batch-Size", "Server-Timing", "Retry-After", "X-Flashpoint-Replica")


class Sites:
    """The names that the server answers to, and the origins whose pages may call it.

    `names` are those of `--allowed-hosts`; empty allows every name until `only_loopback` is called. `origins` are
    those of `--cors-origins`.
    """

    def __init__(self, names: Collection[str], origins: Collection[str]) -> None:
        self._every_name = not names or "*" in names
        self._names = frozenset(name.lower() for name in names if not name.startswith("*"))
        self._endings = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._any_origin = "*" in origins
        self._origins = frozenset(origins)
        self._named = bool(names)
        self._known: set[str] = set()

    def only_loopback(self) -> None:
        """Allow loopback names and `names` alone: the server listens on loopback, and nothing asks who calls."""
        self._every_name = self._every_name and self._named
        self._known.clear()

    def check(self, exchange: Exchange, here: str | None) -> None:
        """Raises Refusal 421 and 403. `here` is the address of the server that the connection has reached."""
        headers = exchange.headers
        host = headers.get("host")
        if host is not None and host not in self._known:
            self._check_host(host, here)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if (site is not None or origin is not None) and not self._welcome(exchange, site, origin, host):
            raise _cross_site(origin)

    def _check_host(self, host: str, here: str | None) -> None:
        """An address that the connection itself has reached is allowed: no name was made to lead to it."""
        name = host_name(host) or ""
        allowed = self._every_name or name in self._names or name.endswith(self._endings) or is_loopback(name)
        if not allowed and (here is None or name.strip("[]") != here):
            raise _not_allowed(name)
        if allowed and len(self._known) < _MOST_KNOWN:
            self._known.add(host)

    def _welcome(self, exchange: Exchange, site: str | None, origin: str | None, host: str | None) -> bool:
        """Whether the request is of this server's own page, of nobody's, or of one that CORS allows.

        A browser that sends no Sec-Fetch-Site, as to http:// and another host than localhost, still sends the origin
        of whatever could do harm.
        """
        if site in ("same-origin", "none"):
            return True
        if self._any_origin or origin in self._origins:
            return True
        if site is None:
            return origin is not None and origin.partition("://")[2].lower() == (host or "").lower()
        by_link = exchange.headers.get("sec-fetch-mode") == "navigate"
        return by_link and exchange.method == "GET" and exchange.path in _PAGES


def _not_allowed(name: str) -> Refusal:
    return Refusal(
        "host_not_allowed",
        f"this server does not answer to the host {name!r}: call it by a loopback name, such as localhost, or start it "
        "with --allowed-hosts (FLASHPOINT_ALLOWED_HOSTS), which names the hosts that it answers to",
    )


def _cross_site(origin: str | None) -> Refusal:
    return Refusal(
        "cross_site",
        f"a browser sent this for a page of another site (origin {origin!r}): start the server with --cors-origins "
        "(FLASHPOINT_CORS_ORIGINS), which names the origins whose pages may call it",
    )


class Cors(CORSMiddleware):
    """Starlette's middleware, which lets pages of other origins call. They send no cookies: nothing here has any."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=_SENT,
            expose_headers=_SHOWN,
        )

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        scope.get("extensions", {}).pop(EXTENSION, None)  # an answer that way leaves without the headers of this one
        await super().simple_response(scope, receive, send, request_headers)
