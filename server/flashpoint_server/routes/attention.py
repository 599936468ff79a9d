"""POST /attention and POST /attention/grad."""

from __future__ import annotations

import time

import numpy as np

from flashpoint_kernels.spec import Direction, ProblemError, Spec, TensorInfo
from flashpoint_kernels.support import choose_backend
from flashpoint_server.access.admission import Permit, check_size
from flashpoint_server.exchange import Timings, Way
from flashpoint_server.formats.encode import encode, text_bytes
from flashpoint_server.formats.message import SafetensorsMessage, make_spec, read_json
from flashpoint_server.formats.negotiation import answer_encoding, request_encoding
from flashpoint_server.http.places import Part
from flashpoint_server.ipc.job import Answer, AttentionJob
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price, price_of
from flashpoint_server.ipc.staging import Staging
from flashpoint_server.refusal import Refusal, invalid, out_of_time
from flashpoint_server.routes.compute import Call, ComputeRoute, deadline_of, priority_of
from flashpoint_server.service import Service


class AttentionRoute(ComputeRoute):
    """The ASGI application of one of the two calls."""

    def __init__(self, service: Service, direction: Direction) -> None:
        super().__init__(service)
        self._direction = direction

    async def serve(self, call: Call) -> None:
        service, settings, headers = self.service, self.service.settings, call.exchange.headers
        body, inside = call.body, call.inside
        call.caller = service.admit(call.exchange, "attention")
        given = request_encoding(headers)
        wanted = answer_encoding(headers, given)
        body.deadline = deadline_of(headers, settings)
        priority = priority_of(headers)
        device = self.begin(inside)
        if given.is_json:
            body.limit = settings.json_limit
        body.check_length(body.length)

        if given.is_json:
            permit = self.admit(call, body.length or body.limit)
            arrays, options = await read_json(body, service.codec)
            inputs = [(name, TensorInfo(array.dtype.name, array.shape)) for name, array in arrays.items()]
            spec = make_spec(dict(inputs), options, self._direction)
            backend = self._backend(spec, device)
            self._check_numbers(spec.output_bytes if wanted.is_json else 0)
            permit.charge(price_of(spec, backend, device), body.deadline, service.engine.pace)
            staging = self.stage(inputs, spec.outputs, inside)
            for name, view in staging.views(staging.inputs).items():
                view[:] = np.ascontiguousarray(arrays.pop(name)).reshape(-1).view(np.uint8).data
        else:
            message = await SafetensorsMessage.begin(body, settings.head_limit)
            spec, backend, price, _ = message.plan(self._direction, device, self._backend)
            self._check_numbers(spec.output_bytes if wanted.is_json else 0)
            permit = self.admit(call, spec.input_bytes + spec.output_bytes)
            permit.charge(price, body.deadline, service.engine.pace)
            staging = self.stage(message.inputs(), spec.outputs, inside)
            await message.receive(body, staging.views(staging.inputs).values())
        if wanted.is_json:
            permit.grow(text_bytes(spec.outputs.values()))
        self.correct(permit, spec, backend, device, staging)
        job, answer = await self.solve(call, spec, backend, staging, permit.price, priority)
        parts = await encode(job, answer, wanted, service.codec)
        await self.finish(call, job, answer, {"content-type": wanted.media_type}, parts)

    @staticmethod
    def correct(permit: Permit, spec: Spec, backend: str, device: DeviceInfo, staging: Staging) -> None:
        """Price the request again by the lengths of its sequences, where they have come with its body."""
        if index := staging.index():
            permit.correct(price_of(spec, backend, device, index))

    async def solve(
        self, call: Call, spec: Spec, backend: str, staging: Staging, price: Price, priority: int
    ) -> tuple[AttentionJob, Answer]:
        """Have what is staged computed. Raises Refusal and ClientGoneError."""
        exchange = call.exchange
        exchange.facts.update(backend=backend, shapes={name: list(p.shape) for name, p in staging.inputs.items()})
        job = AttentionJob(
            id=exchange.request_id,
            spec=spec,
            backend=backend,
            staging=staging,
            timings=Timings(exchange.arrived),
            price=price,
            deadline=call.body.deadline,
            priority=priority,
        )
        return job, await self.run(job, call)

    async def finish(
        self, call: Call, job: AttentionJob, answer: Answer, fields: dict[str, str], parts: list[Part]
    ) -> None:
        """Send what was computed, encoded as `parts`, which `fields` describe. Raises Refusal 504."""
        if job.late:
            raise out_of_time()
        job.timings.done = time.perf_counter()
        durations = job.timings.durations()
        call.exchange.facts.update({f"{name}_ms": ms for name, ms in durations.items()}, batch_size=answer.batch_size)
        call.exchange.way = Way(job.backend, answer.batch_size, answer.launch, job.timings)
        said = {
            **fields,
            "x-backend": job.backend,
            "x-batch-size": str(answer.batch_size),
            "server-timing": ", ".join(f"{name};dur={ms}" for name, ms in durations.items()),
        }
        await self.reply(call, [(name.encode(), value.encode()) for name, value in said.items()], parts)
        self.service.metrics.took(job.timings.stages())

    def _backend(self, spec: Spec, device: DeviceInfo) -> str:
        """Return the backend that will run `spec`, once that is known to fit. Raises Refusal 413 and 422."""
        try:
            backend = choose_backend(spec, device.backends)
        except ProblemError as error:
            raise invalid(error.errors) from None
        check_size(spec, device.memory, self.service.settings.sequence_limit)
        return backend

    def _check_numbers(self, size: int) -> None:
        """Check the bytes of an answer that are sent as JSON numbers. Raises Refusal 413."""
        if size > (limit := self.service.settings.json_limit):
            raise Refusal("work_too_large", f"an answer of {size} bytes is over JSON's limit of {limit}")
