"""The gRPC method ModelInfer, computed like POST /v2/models/{model}/infer.

Its message is read when the caller is authorized and memory for the message is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from starlette.types import Receive, Scope

from flashpoint_contract.options import Direction
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.http.body import ClientGoneError, RequestBody, copy
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.regions import Regions
from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.grpc.answer import encode
from flashpoint_server.oip.grpc.arrivals import LARGEST_MESSAGE, Hold
from flashpoint_server.oip.grpc.framing import split
from flashpoint_server.oip.grpc.request import CONTENTS, RAW_INPUTS, parse
from flashpoint_server.oip.head import InferHead
from flashpoint_server.oip.message import InferMessage
from flashpoint_server.oip.models import Model, find
from flashpoint_server.oip.statistics import Statistics
from flashpoint_server.plan import Plan, refuse_invalid
from flashpoint_server.refusal import Refusal, invalid, out_of_time
from flashpoint_server.routes.pipeline import begin, carry_out, earlier, write
from flashpoint_server.service import Service

PATH = "/inference.GRPCInferenceService/ModelInfer"
EXTENSION = "flashpoint.message"
_ON_THE_WAY = 0.05  # assumed maximum seconds from the start of a call in the client to its arrival in this process
_HEAD_ROOM = 1 << 16  # maximum bytes of an answer without its tensors; most have a few hundred

# Callers repeat a few heads, so the parsed forms of short heads are cached. A long head contains tensors as numbers:
# another process parses it, because this takes long.
_SHORT = 4096  # maximum bytes of a short head
_parse_again = lru_cache(256)(parse)


class Incoming(NamedTuple):
    """A message that has not been read. `read` waits for it and returns None if none comes; `hold` counts its memory.

    `deadline` is the deadline of the call, in `time.monotonic` seconds. After `nearly`, a cancellation counts as a
    missed deadline: the client's deadline may be earlier than `deadline`, because gRPC clients round the remaining time
    up by at most 1% when they send it.
    """

    read: Callable[[], Awaitable[bytes | None]]
    hold: Hold
    deadline: float | None = None
    nearly: float = float("inf")

    @classmethod
    def within(cls, read: Callable[[], Awaitable[bytes | None]], hold: Hold, seconds: float | None) -> Incoming:
        """Return the incoming message of a call with `seconds` left; None means no deadline."""
        now = time.monotonic()
        return (
            cls(read, hold) if seconds is None else cls(read, hold, now + seconds, now + seconds * 0.99 - _ON_THE_WAY)
        )


class MessageBody(RequestBody):
    """The body of a gRPC request: one message, which gRPC delivers when it is complete."""

    def __init__(self, scope: Scope, receive: Receive, _: Mapping[str, str], settings: Settings) -> None:
        super().__init__(scope, receive, {}, settings)
        self.complete = True  # nothing to discard after a refusal: gRPC itself discards an unread message
        self.incoming: Incoming = scope["extensions"][EXTENSION]

    async def read(self) -> bytes:
        """Return the message. Its size is unknown before, so it may take as long as the largest one. Raises Refusal."""
        hold, settings = self.incoming.hold, self._settings
        self.limit = hold.largest
        patience = settings.body_timeout + self.limit / settings.body_rate
        end = earlier(time.monotonic() + patience, self.deadline)
        assert end is not None
        try:
            message = await hold.read(self.incoming.read, _size, end)
        except TimeoutError:
            raise self._too_late(end) from None
        if message is None:
            raise Refusal("malformed_body", f"the call has no message, or one over the limit of {self.limit} bytes")
        self.ended = time.monotonic()
        return self._took(message)


def _size(message: bytes | None) -> int:
    return len(message or b"")


class _GrpcMessage(InferMessage):
    """A ModelInferRequest of `size` bytes, which `hold` counts. `tensors` are views of the tensors' bytes in it."""

    def __init__(
        self,
        head: InferHead,
        regions: Regions,
        direction: Direction,
        tensors: list[memoryview],
        size: int,
        hold: Hold,
    ) -> None:
        super().__init__(head, regions, hold.owner, direction)
        self._tensors = tensors
        self._size = size
        self._hold = hold

    def numbers(self, plan: Plan) -> list[TensorInfo]:
        """Like `InferMessage.numbers`. Count memory for two copies of the answer: its joined parts, and gRPC's copy."""
        for output in self.head.wanted(plan.answers):
            if not (output.binary or output.shared) and (dtype := plan.answers[output.name].dtype) not in CONTENTS:
                problem = f"{output.name!r} is {DATATYPE_OF[dtype]}, which is only available as raw_output_contents"
                raise invalid([("outputs", problem)])
        if (size := plan.spec.output_bytes + _HEAD_ROOM) > LARGEST_MESSAGE:
            raise Refusal("work_too_large", f"an answer of {size} bytes exceeds gRPC's limit of {LARGEST_MESSAGE}")
        self._hold.add(2 * plan.spec.output_bytes)
        return super().numbers(plan)

    async def receive(self, request: Request, places: Mapping[str, memoryview]) -> None:
        """Copy the tensors into `places`, and release the message."""
        await self.fill(places)
        for given, tensor in zip(self.following, self._tensors, strict=True):
            await copy(places[given.name], tensor)
            tensor.release()
        self._tensors.clear()
        self._hold.drop(self._size)


async def infer_grpc(service: Service, request: Request, statistics: Statistics) -> None:
    """Answer a ModelInfer call. Raises Refusal and ClientGoneError."""
    body = request.body
    assert isinstance(body, MessageBody)
    try:
        await _infer(service, request, body, statistics)
    except asyncio.CancelledError:  # cancelled by the caller, or by gRPC after the deadline
        raise (out_of_time() if time.monotonic() >= body.incoming.nearly else ClientGoneError()) from None


async def _infer(service: Service, request: Request, body: MessageBody, statistics: Statistics) -> None:
    caller = service.authorize(request, "attention")
    begin(service, request)
    body.deadline = earlier(body.deadline, body.incoming.deadline)
    body.incoming.hold.owner = caller.name
    message, model = await _read(service, request, body)
    head = message.head
    body.deadline = earlier(body.deadline, head.deadline(service.settings))
    request.priority = max(request.priority, head.priority)
    plan = service.plans.of(message, request.device)
    job = await carry_out(service, request, message, plan, message.numbers, plan.price)
    parts = await encode(model.name, head, plan, job, body, service.codec)
    stages = await write(service, request, job, parts, {})
    statistics.computed(model.name, job.done.batch_size, stages)


async def _read(service: Service, request: Request, body: MessageBody) -> tuple[InferMessage, Model]:
    """Return the InferMessage with its tensors, and the model that it names. Raises Refusal 400, 404, 413 and 422."""
    message = await body.read()
    with refuse_invalid():
        text, tensors = split(message, RAW_INPUTS)
        if len(text) > (limit := service.settings.json_limit):
            raise Refusal("body_too_large", f"{len(text)} bytes without raw_input_contents exceed the limit of {limit}")
        sizes = tuple(map(len, tensors))
        short = len(text) <= _SHORT
        parsed = _parse_again(text, sizes) if short else await service.codec.parse(body, parse, text, sizes)
    hold = body.incoming.hold
    model = find(parsed.model, parsed.version)
    request.facts["model"] = model.name
    return _GrpcMessage(parsed.head, service.regions, model.direction, tensors, len(message), hold), model
