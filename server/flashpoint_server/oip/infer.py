"""POST /v2/models/{model}/infer."""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from starlette.types import Receive, Scope, Send

from flashpoint import wire
from flashpoint.jsonwire import FieldError
from flashpoint_kernels.spec import INDEX_TENSORS, Spec
from flashpoint_server.access.admission import Permit
from flashpoint_server.exchange import Exchange
from flashpoint_server.formats.encode import text_bytes
from flashpoint_server.formats.message import read_text
from flashpoint_server.http.body import Body
from flashpoint_server.ipc.job import Answer, AttentionJob
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import price_of
from flashpoint_server.ipc.regions import Region, check_apart
from flashpoint_server.ipc.staging import Staging
from flashpoint_server.oip.answers import compressed, encode
from flashpoint_server.oip.head import Head, Input, Wanted, parse
from flashpoint_server.oip.inflated import WINDOW_BITS, InflatedBody
from flashpoint_server.oip.models import VERSION, Model
from flashpoint_server.oip.statistics import Statistics
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.attention import AttentionRoute
from flashpoint_server.routes.compute import Call, deadline_of, priority_of
from flashpoint_server.service import Service

HEAD_LENGTH = "inference-header-content-length"

# A model sends the same few heads again and again. A long one is read anew, in another process: its numbers take time.
_SHORT = 4096  # bytes
_parse_again = lru_cache(256)(parse)


class Placed(NamedTuple):
    """A request that has its memory; `views` are of the inputs there."""

    spec: Spec
    backend: str
    permit: Permit
    wanted: tuple[Wanted, ...]
    staging: Staging
    views: dict[str, memoryview]


class InferRoute(AttentionRoute):
    """The ASGI application of one model: binary tensors arrive and leave as /attention's do."""

    def __init__(self, service: Service, model: Model, statistics: Statistics) -> None:
        super().__init__(service, model.direction)
        self._statistics = statistics
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended(exchange)

    def ended(self, exchange: Exchange) -> None:
        """Count a request to this model, which is over."""
        success = exchange.status == 200 and exchange.code is None
        self._statistics.ended(self._model.name, success, time.perf_counter() - exchange.arrived)

    def computed(self, job: AttentionJob, answer: Answer) -> None:
        """Count a request to this model, which was computed."""
        self._statistics.computed(self._model.name, answer.batch_size, job.timings.stages())

    def body(self, scope: Scope, receive: Receive, exchange: Exchange) -> Body:
        coding = exchange.headers.get("content-encoding", "")
        if coding in WINDOW_BITS:
            return InflatedBody(scope, receive, exchange.headers, self.service.settings, coding)
        return super().body(scope, receive, exchange)

    async def serve(self, call: Call) -> None:
        service, settings, headers = self.service, self.service.settings, call.exchange.headers
        body = call.body
        call.caller = service.admit(call.exchange, "attention")
        if (coding := headers.get("content-encoding", "identity")) not in ("identity", *WINDOW_BITS):
            raise Refusal("unsupported_media_type", f"a body in content coding {coding} is not taken")
        body.deadline = deadline_of(headers, settings)
        priority = priority_of(headers)
        device = self.begin(call.inside)

        size = _head_size(headers.get(HEAD_LENGTH), settings.head_limit)
        if size is None:
            body.limit = settings.json_limit
        body.check_length(body.length)
        permit = None
        if size is None and (body.length is None or body.length > _SHORT):
            permit = self.admit(call, body.length or body.limit)
        text, rest = (await read_text(body), b"") if size is None else await _read(body, size)
        head = await self._parsed(text, body.deadline)
        if size is not None and body.length is not None and body.length != size + head.data_size:
            due = size + head.data_size
            raise Refusal("malformed_body", f"the body has {body.length} bytes where its head says {due}")
        body.check_length(len(text) + head.data_size)
        if (deadline := head.deadline(settings)) is not None:
            body.deadline = min(body.deadline or deadline, deadline)

        placed = self.place(call, head, device, permit)
        await body.into([placed.views[i.name] for i in head.inputs if i.array is None and i.shared is None], rest)

        job, answer = await self.solve_placed(call, placed, device, max(priority, head.priority))
        parts, fields = await encode(self._model.name, VERSION, head.id, placed.wanted, job, answer, service.codec)
        if (coding := headers.get("accept-encoding", "").strip()) in WINDOW_BITS:  # exactly: see docs/oip.md
            parts, fields["content-encoding"] = await compressed(parts, coding), coding
        await self.finish(call, job, answer, fields, parts)
        self.computed(job, answer)

    async def solve_placed(
        self, call: Call, placed: Placed, device: DeviceInfo, priority: int
    ) -> tuple[AttentionJob, Answer]:
        """Have a request computed whose tensors are all in their places. Raises Refusal and ClientGoneError."""
        spec, backend, permit, _, staging, _ = placed
        self.correct(permit, spec, backend, device, staging)
        return await self.solve(call, spec, backend, staging, permit.price, priority)

    def place(self, call: Call, head: Head, device: DeviceInfo, permit: Permit | None = None) -> Placed:
        """Priced, let in unless it has a permit, and given room, with what its head has of tensors. Raises Refusal."""
        assert call.caller is not None  # who asks is looked at first
        owner = call.caller.name
        spec = head.spec(self._direction)
        wanted = head.wanted(spec)
        in_numbers = [spec.outputs[o.name] for o in wanted if not (o.binary or o.shared)]
        backend = self._backend(spec, device)
        self._check_numbers(sum(info.nbytes for info in in_numbers))
        permit = permit or self.admit(call, spec.input_bytes + spec.output_bytes)
        if in_numbers:
            permit.grow(text_bytes(in_numbers))
        permit.charge(price_of(spec, backend, device), call.body.deadline, self.service.engine.pace)
        elsewhere = self._elsewhere(owner, head.inputs, wanted, spec)
        inputs = [(given.name, given.info) for given in head.inputs]
        staging = self.stage(inputs, spec.outputs, call.inside, elsewhere)
        views = staging.views(staging.inputs)
        for given in head.inputs:
            if given.array is not None:
                views[given.name][:] = np.ascontiguousarray(given.array).reshape(-1).view(np.uint8).data
            elif given.shared is not None and given.name in views:
                views[given.name][:] = self.service.regions.read(owner, given.name, given.info, given.shared)
        return Placed(spec, backend, permit, wanted, staging, views)

    def _elsewhere(
        self, owner: str, inputs: tuple[Input, ...], wanted: tuple[Wanted, ...], spec: Spec
    ) -> dict[str, tuple[Region, int]]:
        """The tensors in shared memory, but for those whose values are checked: they are read once. Raises Refusal."""
        locate = partial(self.service.regions.locate, owner)
        given = {i.name: locate(i.name, i.info, i.shared) for i in inputs if i.shared and i.name not in INDEX_TENSORS}
        asked = {o.name: locate(o.name, spec.outputs[o.name], o.shared, spare=True) for o in wanted if o.shared}
        if asked:
            check_apart(given, asked, {**spec.tensors, **spec.outputs})
        return given | asked

    async def _parsed(self, text: bytes, deadline: float | None) -> Head:
        try:
            return _parse_again(text) if len(text) <= _SHORT else await self.service.codec.run(deadline, parse, text)
        except wire.WireError as error:
            raise Refusal("malformed_body", str(error)) from None
        except FieldError as error:
            raise invalid([(error.field, error.message)]) from None


def _head_size(said: str | None, limit: int) -> int | None:
    """Bytes of JSON before the tensors, by its header; None where all is JSON. Raises Refusal 400."""
    if said is None:
        return None
    if not (said.isascii() and said.isdecimal() and len(said) < 16):
        raise Refusal("malformed_body", "Inference-Header-Content-Length must be a number of bytes")
    if not int(said):
        raise Refusal("malformed_body", "a raw request has one input, and attention takes three at least")
    if int(said) > limit:
        raise Refusal("malformed_body", f"a head of {said} bytes is over the limit of {limit}")
    return int(said)


async def _read(body: Body, size: int) -> tuple[bytes, bytes]:
    """The first `size` bytes, and what came with them. Raises Refusal."""
    start = bytearray()
    while len(start) < size:
        if not (chunk := await body.next()):
            raise Refusal("malformed_body", f"the body ends after {len(start)} bytes, within the head")
        start += chunk
    return bytes(start[:size]), bytes(memoryview(start)[size:])
