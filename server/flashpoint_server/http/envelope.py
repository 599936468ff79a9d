"""The outermost middleware: gives each request an id and a log line, and answers 500 if our code fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from flashpoint_server.http.body import ClientGoneError
from flashpoint_server.http.request import OTHER, Request
from flashpoint_server.refusal import STATUS, Refusal, Writer

log = structlog.stdlib.get_logger("flashpoint.http")

_PARTS = 8  # maximum parts of a path in logs and metrics; the longest path of /v2 has 7
CLIENT_GONE = 499  # not an HTTP status: nginx logs it for a client that disconnects before its answer
ENDLESS = "/events"  # the last part of the paths of event streams, which last as long as their job


class Application(FastAPI):
    """The FastAPI application. POSTs to paths in `posts` bypass FastAPI, which saves 10% of a small request's time."""

    posts: Mapping[str, ASGIApp]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and not scope["path"].endswith(ENDLESS):
            Request.open(scope)  # before the method changes: the log says HEAD
            scope = {**scope, "method": "GET"}  # answered like GET; uvicorn omits the body (RFC 9110, §9.3.2)
        post = self.posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (post or super().__call__)(scope, receive, send)


@dataclass(eq=False)
class Envelope:
    """ASGI middleware, the outermost of ours.

    Logs name a request by its path, with * for each part that is not in `words`, as in `/caches/*/append`: such a part
    may be a secret. The functions in `ended` get each request that has ended, this name if it is in `paths` and else
    OTHER, and its seconds. Requests to the health paths in `probes` are logged at level debug. `check` raises Refusal
    for a request that no route may receive. `writers` maps the first part of a path to the function that writes its
    error bodies; the default writes a problem document.
    """

    app: ASGIApp
    paths: Collection[str]
    ended: Sequence[Callable[[Request, str, float], None]]
    words: Collection[str] = ()
    check: Callable[[Request, str | None], None] | None = None
    writers: Mapping[str, Writer] = field(default_factory=dict)
    probes: Collection[str] = ()

    @cached_property
    def _log(self) -> Any:
        """`log`, bound at the first request: an unbound logger reads its configuration at each call."""
        return log.bind()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request.open(scope)
        if (writer := self.writers.get(request.path.partition("/")[2].partition("/")[0])) is not None:
            request.write_refusal = writer

        async def counted_receive() -> Message:
            message = await receive()
            request.bytes_in += len(message.get("body", b""))
            return message

        async def stamped_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                message["headers"] = request.answer_fields(message.get("headers", ()))
            else:
                request.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            try:
                if self.check is not None:
                    self.check(request, (scope.get("server") or (None,))[0])
            except Refusal as refusal:
                await send_refusal(stamped_send, request, refusal)
            else:
                await self.app(scope, counted_receive, stamped_send)
        except ClientGoneError:
            if request.status is None:  # an answer that had begun has its status, and its code is stored already
                request.status, request.code = CLIENT_GONE, "client_gone"
        except asyncio.CancelledError:
            if request.status is None:  # the server stops without waiting for the request
                request.status, request.code = STATUS["draining"], "draining"
            raise
        except Exception as error:
            log.exception("failed", request_id=request.request_id, error=type(error).__name__)
            if request.status is not None:
                raise  # an answer that has started cannot be replaced: the connection is closed
            failure = Refusal("internal_error", "the server failed: a bug, logged with this request's id")
            await send_refusal(stamped_send, request, failure)
        finally:
            seconds = time.perf_counter() - request.arrived
            route = request.path if request.path in self.paths else _masked(request.path, self.words)
            known = route in self.paths
            for count in self.ended:
                count(request, route if known else OTHER, seconds)
            tell = self._log.debug if not known and request.path in self.probes else self._log.info
            tell("request", **_log_fields(request, route, seconds))


async def send_refusal(send: Send, request: Request, refusal: Refusal, *, more: bool = False) -> None:
    """Send a refusal as the answer. With `more`, the caller must send a last, empty message."""
    request.code = refusal.code
    media_type, body = request.write_refusal(refusal, request.request_id)
    fields = {"content-type": media_type, "content-length": str(len(body)), **refusal.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": more})


def refuse_outside(
    ended: Callable[[Request, str, float], None],
    scope: MutableMapping[str, Any] | None,
    refusal: Refusal,
    route: str,
) -> tuple[str, bytes]:
    """Return the id of a request that no route can answer, and the bytes of the answer, which ends the connection.

    `scope` is None for input that is not a request. `ended` counts the request under `route`, unless this is "".
    """
    request = Request.open({"method": "", "path": "", "headers": ()} if scope is None else scope)
    media_type, body = request.write_refusal(refusal, request.request_id)
    request.status, request.code, request.bytes_out = refusal.status, refusal.code, len(body)
    given = {"content-type": media_type, "content-length": str(len(body)), **refusal.headers, "Connection": "close"}
    fields = request.answer_fields(((name.lower().encode(), value.encode()) for name, value in given.items()))
    head = b"".join(b"%s: %s\r\n" % field for field in fields)
    if route:
        ended(request, route, time.perf_counter() - request.arrived)
    return request.request_id, b"%s%s\r\n%s" % (STATUS_LINE[refusal.status], head, body)


def _masked(path: str, words: Collection[str]) -> str:
    """Return the path with * for each part that is not in `words`; at most _PARTS parts."""
    first, *parts = path.split("/", _PARTS)
    return "/".join((first and "*", *(part if part in words else "*" for part in parts)))


def _log_fields(request: Request, route: str, seconds: float) -> Mapping[str, Any]:
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "method": request.method,
        "route": route,
        "status": request.status,
        "bytes_in": request.bytes_in,
        "bytes_out": request.bytes_out,
        "total_ms": round(seconds * 1000, 3),
        **request.facts,
    }
    if request.key:
        fields["key"] = request.key
    if request.code:
        fields["code"] = request.code
    return fields
