"""ModelInfer: read once its caller is known and there is room, computed as /v2's inference is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from flashpoint.jsonwire import FieldError
from flashpoint.wire import WireError
from flashpoint_server.exchange import Exchange
from flashpoint_server.http.body import Body, ClientGoneError
from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.grpc.answer import encode
from flashpoint_server.oip.grpc.arrivals import LARGEST_MESSAGE, Hold
from flashpoint_server.oip.grpc.framing import split
from flashpoint_server.oip.grpc.request import CONTENTS, RAW_INPUTS, Asked, parse
from flashpoint_server.oip.infer import InferRoute
from flashpoint_server.oip.models import MODELS, VERSION, find
from flashpoint_server.oip.statistics import Statistics
from flashpoint_server.refusal import Refusal, invalid, out_of_time
from flashpoint_server.routes.compute import Call, ComputeRoute, deadline_of, priority_of
from flashpoint_server.service import Service

PATH = "/inference.GRPCInferenceService/ModelInfer"
EXTENSION = "flashpoint.message"
_ON_THE_WAY = 0.05  # seconds
_HEAD_ROOM = 1 << 16  # bytes of an answer beside its tensors; it has some hundred

# A model sends the same few heads again and again. A long one is read anew, in another process: its numbers take time.
_SHORT = 4096  # bytes
_parse_again = lru_cache(256)(parse)


class Incoming(NamedTuple):
    """A message that has not been read: `read` waits for it, None where none comes; `hold` counts its memory.

    `deadline` is the call's own, in `time.monotonic` seconds, and `nearly` when its caller may have given up for it:
    when gRPC tells a server of the time that is left, it rounds that up, by a hundredth at most.
    """

    read: Callable[[], Awaitable[bytes | None]]
    hold: Hold
    deadline: float | None = None
    nearly: float = float("inf")

    @classmethod
    def within(cls, read: Callable[[], Awaitable[bytes | None]], hold: Hold, seconds: float | None) -> Incoming:
        """Of a call with so many seconds left; None for no end."""
        now = time.monotonic()
        return (
            cls(read, hold) if seconds is None else cls(read, hold, now + seconds, now + seconds * 0.99 - _ON_THE_WAY)
        )


class Message(Body):
    """A body that is one message, and comes whole."""

    def __init__(self, scope: Scope, receive: Receive, exchange: Exchange, service: Service) -> None:
        super().__init__(scope, receive, {}, service.settings)
        self.complete = True  # what is not read of a call that is over, gRPC throws away
        self.incoming: Incoming = scope["extensions"][EXTENSION]

    async def read(self) -> bytes:
        """Of its size nobody says anything before it is there: it may be as slow as the largest. Raises Refusal."""
        hold, settings = self.incoming.hold, self._settings
        self.limit = hold.largest
        patience = settings.body_timeout + self.limit / settings.body_rate
        end = _sooner(time.monotonic() + patience, self.deadline)
        assert end is not None
        try:
            message = await hold.read(self.incoming.read, _size, end)
        except TimeoutError:
            raise self._too_late(end) from None
        if message is None:
            raise Refusal("malformed_body", f"there is no message, or one of more than {self.limit} bytes")
        self.ended = time.monotonic()
        return self._took(message)


def _size(message: bytes | None) -> int:
    return len(message or b"")


class InferMethod(ComputeRoute):
    """The ASGI application of the method, for all models."""

    def __init__(self, service: Service, statistics: Statistics) -> None:
        super().__init__(service)
        self._routes = {name: InferRoute(service, model, statistics) for name, model in MODELS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            if (model := exchange.facts.get("model")) is not None:
                self._routes[model].ended(exchange)

    def body(self, scope: Scope, receive: Receive, exchange: Exchange) -> Message:
        return Message(scope, receive, exchange, self.service)

    async def serve(self, call: Call) -> None:
        assert isinstance(call.body, Message)
        try:
            await self._serve(call, call.body)
        except asyncio.CancelledError:  # by its caller, or by gRPC when the call's deadline has passed
            late = time.monotonic() >= call.body.incoming.nearly
            raise (out_of_time() if late else ClientGoneError()) from None

    async def _serve(self, call: Call, body: Message) -> None:
        service, exchange = self.service, call.exchange
        call.caller = caller = service.admit(exchange, "attention")
        body.deadline = _sooner(deadline_of(exchange.headers, service.settings), body.incoming.deadline)
        priority = priority_of(exchange.headers)
        device = self.begin(call.inside)
        body.incoming.hold.owner = caller.name
        message = await body.read()
        asked, tensors = await self._parsed(message, body.deadline)
        model, head = find(asked.model, asked.version), asked.head
        exchange.facts["model"] = model.name
        body.deadline = _sooner(body.deadline, head.deadline(service.settings))

        route = self._routes[model.name]
        spec = head.spec(model.direction)
        wanted = head.wanted(spec)
        in_numbers = [(o.name, spec.outputs[o.name].dtype) for o in wanted if not (o.binary or o.shared)]
        if missing := [f"{name!r} is {DATATYPE_OF[dtype]}" for name, dtype in in_numbers if dtype not in CONTENTS]:
            raise invalid([("outputs", f"{missing[0]}, which is answered as raw_output_contents")])
        if (size := spec.output_bytes + _HEAD_ROOM) > LARGEST_MESSAGE:
            raise Refusal("work_too_large", f"an answer of {size} bytes is over gRPC's limit of {LARGEST_MESSAGE}")
        body.incoming.hold.add(2 * spec.output_bytes)  # the answer, joined, and gRPC's copy of it
        placed = route.place(call, head, device)
        in_raw = (given for given in head.inputs if given.array is None and given.shared is None)
        for given, tensor in zip(in_raw, tensors, strict=True):
            placed.views[given.name][:] = tensor
        size = len(message)
        del message, tensors
        body.incoming.hold.drop(size)
        job, answer = await route.solve_placed(call, placed, device, max(priority, head.priority))
        parts = await encode(model.name, VERSION, head.id, placed.wanted, job, answer, service.codec)
        await route.finish(call, job, answer, {}, parts)
        route.computed(job, answer)

    async def _parsed(self, message: bytes, deadline: float | None) -> tuple[Asked, list[memoryview]]:
        """What it asks, and the bytes of its tensors. Raises Refusal 400, 413, 422."""
        try:
            text, tensors = split(message, RAW_INPUTS)
            if len(text) > (limit := self.service.settings.json_limit):
                raise Refusal("body_too_large", f"{len(text)} bytes beside raw_input_contents are over {limit}")
            sizes = tuple(map(len, tensors))
            if len(text) <= _SHORT:
                return _parse_again(text, sizes), tensors
            return await self.service.codec.run(deadline, parse, text, sizes), tensors
        except WireError as error:
            raise Refusal("malformed_body", str(error)) from None
        except FieldError as error:
            raise invalid([(error.field, error.message)]) from None


def _sooner(one: float | None, other: float | None) -> float | None:
    """Of two deadlines, each None for no end."""
    return min((end for end in (one, other) if end is not None), default=None)
