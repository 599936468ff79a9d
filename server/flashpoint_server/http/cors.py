"""Pages of other origins, where `--cors-origins` lets them call."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from flashpoint_server.config.settings import Settings
from flashpoint_server.http.protocol import EXTENSION

_BOTH = ("X-Request-Id", "Inference-Header-Content-Length")
_SENT = (*_BOTH, "Authorization", "X-Timeout-Ms", "X-Priority")
_SHOWN = (*_BOTH, "X-Backend", "X-Batch-Size", "Server-Timing", "Retry-After")


class Cors(CORSMiddleware):
    """Starlette's, for the calls that have an `Origin`. They go without cookies, which nothing here has."""

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
