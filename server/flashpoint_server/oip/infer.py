"""The route POST /v2/models/{model}/infer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from flashpoint_contract.options import Direction
from flashpoint_server.config.settings import Settings
from flashpoint_server.http.body import RequestBody
from flashpoint_server.http.request import Request, request_of
from flashpoint_server.oip.answers import compressed, encode
from flashpoint_server.oip.head import parse
from flashpoint_server.oip.inflated import WINDOW_BITS, InflatedBody
from flashpoint_server.oip.message import InferMessage
from flashpoint_server.oip.models import Model
from flashpoint_server.oip.statistics import Statistics
from flashpoint_server.plan import refuse_invalid
from flashpoint_server.refusal import Refusal
from flashpoint_server.routes.pipeline import admit, begin, carry_out, earlier, write
from flashpoint_server.service import Service

HEAD_LENGTH = "inference-header-content-length"

# Callers repeat a few heads, so the parsed forms of short heads are cached. A long head contains tensors as numbers:
# another process parses it, because this takes long.
_SHORT = 4096  # maximum bytes of a short head
_parse_again = lru_cache(256)(parse)


class HttpMessage(InferMessage):
    """A message whose tensors' bytes follow the head in the body."""

    async def receive(self, request: Request, places: Mapping[str, memoryview]) -> None:
        await self.fill(places)
        await request.body.into([places[given.name] for given in self.following], request.rest)


def make_body(scope: Scope, receive: Receive, headers: Mapping[str, str], settings: Settings) -> RequestBody:
    """Return an object that reads a request's body, and decompresses it if needed."""
    coding = headers.get("content-encoding", "")
    if coding in WINDOW_BITS:
        return InflatedBody(scope, receive, headers, settings, coding)
    return RequestBody(scope, receive, headers, settings)


class Counted:
    """Wraps an ASGI application, and counts each request to `model` when it ends.

    If `model` is None (gRPC), the application stores the model's name in `Request.facts`.
    """

    def __init__(self, app: ASGIApp, statistics: Statistics, model: str | None = None) -> None:
        self._app = app
        self._statistics = statistics
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = request_of(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            if (model := self._model or request.facts.get("model")) is not None:
                success = request.status == 200 and request.code is None
                self._statistics.ended(model, success, time.perf_counter() - request.arrived)


async def infer(service: Service, request: Request, model: Model, statistics: Statistics) -> None:
    """Answer a request of POST /v2/models/{model}/infer. Raises Refusal and ClientGoneError."""
    headers = request.headers
    service.authorize(request, "attention")
    if (coding := headers.get("content-encoding", "identity")) not in ("identity", *WINDOW_BITS):
        raise Refusal(
            "unsupported_media_type",
            f"content coding {coding} is not supported; use {' or '.join(WINDOW_BITS)}, or none",
        )
    begin(service, request)
    message = await _read(service, request, model.direction)
    head = message.head
    request.body.deadline = earlier(request.body.deadline, head.deadline(service.settings))
    request.priority = max(request.priority, head.priority)
    plan = service.plans.of(message, request.device)
    job = await carry_out(service, request, message, plan, message.numbers, plan.price)
    parts, fields = await encode(model.name, head, plan, job, request.body, service.codec)
    # Compress only if the field names a single coding: clients that did not choose one send a list.
    if (coding := headers.get("accept-encoding", "").strip()) in WINDOW_BITS:
        parts, fields["content-encoding"] = await compressed(parts, coding), coding
    stages = await write(service, request, job, parts, fields)
    statistics.computed(model.name, job.done.batch_size, stages)


async def _read(service: Service, request: Request, direction: Direction) -> InferMessage:
    """Read the head, and return the message. A long JSON body is admitted by its length before it is read.

    Raises Refusal.
    """
    body, settings = request.body, service.settings
    size = _head_size(request.headers.get(HEAD_LENGTH), settings.head_limit)
    if size is None:
        body.limit = settings.json_limit
    body.check_length(body.length)
    if size is None and (body.length is None or body.length > _SHORT):
        admit(service, request, body.length or body.limit)
    text, request.rest = (await body.text(), b"") if size is None else await _start(body, size)
    with refuse_invalid():
        short = len(text) <= _SHORT
        head = _parse_again(bytes(text)) if short else await service.codec.parse(body, parse, text)
    if size is not None and body.length is not None and body.length != size + head.data_size:
        due = size + head.data_size
        raise Refusal("malformed_body", f"the body has {body.length} bytes, but its head says {due}")
    body.check_length(len(text) + head.data_size)
    return HttpMessage(head, service.regions, request.caller.name, direction)


def _head_size(text: str | None, limit: int) -> int | None:
    """Return the size of the JSON before the tensors, from the header field `text`; None if the body is only JSON.

    Raises Refusal 400.
    """
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise Refusal("malformed_body", "Inference-Header-Content-Length must be a number of bytes")
    if not int(text):
        raise Refusal(
            "malformed_body", "raw requests are not supported: they have one input, and attention needs three"
        )
    if int(text) > limit:
        raise Refusal("malformed_body", f"a head of {text} bytes exceeds the limit of {limit}")
    return int(text)


async def _start(body: RequestBody, size: int) -> tuple[bytes, bytes]:
    """Return the first `size` bytes of the body, and the bytes after them that were read as well. Raises Refusal."""
    start = bytearray()
    while len(start) < size:
        if not (chunk := await body.next()):
            raise Refusal("malformed_body", f"the body ends after {len(start)} bytes, inside its head")
        start += chunk
    return bytes(start[:size]), bytes(memoryview(start)[size:])
