"""POST /verify: how far a backend, or what the caller computed elsewhere, is from float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from flashpoint import jsonwire, strictjson, wire
from flashpoint._proof import ANSWERS
from flashpoint.options import AttentionOptions
from flashpoint.validation import field_problems
from flashpoint.verify_schema import VerifyRequest
from flashpoint_kernels.spec import (
    BACKWARD_TENSORS,
    FORWARD_TENSORS,
    Direction,
    Options,
    ProblemError,
    Spec,
    TensorInfo,
    plan,
)
from flashpoint_server.access.admission import check_size
from flashpoint_server.exchange import Timings
from flashpoint_server.formats.codec import Arrays
from flashpoint_server.formats.message import SafetensorsMessage, decode_json, read_text
from flashpoint_server.formats.negotiation import request_encoding
from flashpoint_server.ipc.job import ProofJob
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price, proof_price
from flashpoint_server.ipc.staging import Staging
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.compute import Call, ComputeRoute, deadline_of, priority_of

_PROBLEM = tuple(name for name in BACKWARD_TENSORS if name not in ANSWERS)
IN_FLOAT64 = 8  # times a problem's own bytes: drawn, answered and differentiated in 8 bytes where it has 2 or 4
DRAWN_LIMIT = 1 << 16  # bytes of a request whose tensors the server draws; the longest has some hundred


class VerifyRoute(ComputeRoute):
    """Tensors travel as to /attention; a problem to be drawn is a JSON object with a `shape`. The answer is JSON."""

    async def serve(self, call: Call) -> None:
        service, headers, body = self.service, call.exchange.headers, call.body
        call.caller = service.admit(call.exchange, "verify")
        given = request_encoding(headers)
        body.deadline = deadline = deadline_of(headers, service.settings)
        priority = priority_of(headers)
        device = self.begin(call.inside)
        if given.is_json:
            body.limit = service.settings.json_limit
        body.check_length(body.length)
        request, price, staging = await (self._json if given.is_json else self._safetensors)(call, device)
        job = ProofJob(
            id=call.exchange.request_id,
            request=request,
            price=price,
            staging=staging,
            timings=Timings(call.exchange.arrived),
            deadline=deadline,
            priority=priority,
        )
        report = (await self.run(job, call)).report
        await self.reply(call, [(b"content-type", jsonwire.MEDIA_TYPE.encode())], [report])

    async def _safetensors(self, call: Call, device: DeviceInfo) -> tuple[bytes, Price, Staging]:
        """What is asked, its price, and the tensors in their places. Raises Refusal."""
        message = await SafetensorsMessage.begin(call.body, self.service.settings.head_limit)
        inputs = message.inputs()
        options, price = self._check(dict(inputs), wire.decode_options(message.metadata), device)
        permit = self.admit(call, sum(info.nbytes for _, info in inputs))
        permit.charge(price)
        staging = self.stage(inputs, {}, call.inside)
        await message.receive(call.body, staging.views(staging.inputs).values())
        return options, price, staging

    async def _json(self, call: Call, device: DeviceInfo) -> tuple[bytes, Price, Staging]:
        permit = self.admit(call, call.body.length or call.body.limit)
        text, arrays = await read_text(call.body), Arrays()
        if (drawn := _drawn(text)) is not None:
            request, price = drawn.model_dump_json().encode(), self._price(_spec_of(drawn), device)
        else:
            arrays, said = await decode_json(text, self.service.codec, call.body.deadline)
            infos = {name: TensorInfo(array.dtype.name, array.shape) for name, array in arrays.items()}
            request, price = self._check(infos, said, device)
        permit.charge(price)
        inputs = [(name, TensorInfo(array.dtype.name, array.shape)) for name, array in arrays.items()]
        staging = self.stage(inputs, {}, call.inside)
        for name, view in staging.views(staging.inputs).items():
            view[:] = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data
        return request, price, staging

    def _check(
        self, infos: Mapping[str, TensorInfo], said: Mapping[str, Any], device: DeviceInfo
    ) -> tuple[bytes, Price]:
        """The options of tensors that a caller sends, in JSON, and their price. Raises Refusal 413 and 422."""
        known = (*_PROBLEM, *ANSWERS)
        if unknown := [name for name in infos if name not in known]:
            raise invalid((name, f"unknown tensor; known are {', '.join(known)}") for name in unknown)
        direction: Direction = "backward" if "do" in infos else "forward"
        names = _PROBLEM if direction == "backward" else FORWARD_TENSORS
        try:
            options = AttentionOptions.model_validate(said)
            problem = {name: info for name, info in infos.items() if name in names}
            spec = plan(problem, Options(**options.model_dump()), direction)
        except ValidationError as error:
            raise invalid(field_problems(error)) from None
        except ProblemError as error:
            raise invalid(error.errors) from None
        return options.model_dump_json().encode(), self._price(spec, device)

    def _price(self, spec: Spec, device: DeviceInfo) -> Price:
        """Return what it costs to verify the problem, which is held in float64, too. Raises Refusal 413."""
        check_size(spec, device.memory // IN_FLOAT64, self.service.settings.sequence_limit)
        price = proof_price(spec, device)
        if price.flops > (most := self.service.settings.verify_flops):
            raise Refusal(
                "work_too_large", f"to verify this takes {price.flops:.3g} FLOPs, over the {most:.3g} allowed"
            )
        return price


def _drawn(text: bytes) -> VerifyRequest | None:
    """The request for a problem to be drawn, where `text` is one. Raises Refusal 422."""
    if len(text) > DRAWN_LIMIT:
        return None
    try:
        document = strictjson.loads(text)
    except ValueError:
        return None  # said by who reads tensors
    if not isinstance(document, dict) or "shape" not in document:
        return None
    try:
        return VerifyRequest.model_validate_json(text)
    except ValidationError as error:
        raise invalid(field_problems(error)) from None


def _spec_of(request: VerifyRequest) -> Spec:
    """The problem that is drawn, as far as its price goes. Raises Refusal 422."""
    shape = request.shape
    q = (shape.batch, shape.q_heads, shape.q_len, shape.head_dim)
    infos = {
        "q": TensorInfo(request.dtype, q),
        "k": TensorInfo(request.dtype, (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim)),
        "v": TensorInfo(request.dtype, (shape.batch, shape.kv_heads, shape.kv_len, shape.value_dim)),
    }
    direction: Direction = "forward" if request.direction == "forward" else "backward"
    if direction == "backward":
        infos["do"] = TensorInfo(request.dtype, (*q[:-1], shape.value_dim))
    try:
        return plan(infos, Options(causal=request.causal), direction)
    except ProblemError as error:
        raise invalid(error.errors) from None
