"""POST /attention and POST /attention/grad: from the socket to the engine and back.

Plain ASGI, for a request is answered from its head, before its body has come, where that already decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from flashpoint_kernels.spec import Direction, ProblemError, Spec, TensorInfo
from flashpoint_kernels.support import choose_backend
from flashpoint_server.admission import Permit, check_size
from flashpoint_server.body import Body, ClientGoneError
from flashpoint_server.encode import Part, encode
from flashpoint_server.envelope import send_refusal
from flashpoint_server.exchange import Exchange
from flashpoint_server.job import Answer, Job, Timings
from flashpoint_server.message import SafetensorsMessage, make_spec, read_json
from flashpoint_server.messages import DeviceInfo
from flashpoint_server.negotiation import Encoding, answer_encoding, request_encoding
from flashpoint_server.protocol import Direct
from flashpoint_server.refusal import Refusal, invalid, out_of_time
from flashpoint_server.service import Service
from flashpoint_server.settings import Settings
from flashpoint_server.staging import Staging


class AttentionRoute:
    """The ASGI application of one of the two calls."""

    def __init__(self, service: Service, direction: Direction) -> None:
        self._service = service
        self._direction = direction

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        body = Body(scope, receive, exchange.headers, self._service.settings)
        try:
            with ExitStack() as inside:
                job, answer, wanted, parts = await self._answer(exchange, body, inside, receive)
                await self._send(send, exchange, body.direct, job, answer, wanted, parts)
        except Refusal as refusal:
            await _refuse(send, exchange, refusal, body)
        except ClientGoneError:
            exchange.code = "client_gone"
        finally:
            exchange.bytes_in = max(exchange.bytes_in, body.received)

    async def _answer(
        self, exchange: Exchange, body: Body, inside: ExitStack, receive: Receive
    ) -> tuple[Job, Answer, Encoding, list[Part]]:
        service, settings, headers = self._service, self._service.settings, exchange.headers
        service.keys.admit(headers, "attention")
        given = request_encoding(headers)
        wanted = answer_encoding(headers, given)
        body.deadline = deadline = _deadline(headers, settings)
        priority = _priority(headers)
        device = inside.enter_context(service.work())
        if given.is_json:
            body.limit = settings.json_limit
        body.check_length(body.length)

        if given.is_json:
            permit = inside.enter_context(self._admitted(exchange, body.length or body.limit))
            arrays, options = await read_json(body, service.codec)
            inputs = [(name, TensorInfo(array.dtype.name, array.shape)) for name, array in arrays.items()]
            spec = make_spec(dict(inputs), options, self._direction)
            backend = self._backend(spec, device, wanted)
            permit.price(spec.flops)
            staging = self._stage(inputs, spec, inside)
            for name, view in staging.views(staging.inputs).items():
                view[:] = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data
        else:
            message = await SafetensorsMessage.begin(body, settings.head_limit)
            spec = message.spec(self._direction)
            backend = self._backend(spec, device, wanted)
            permit = inside.enter_context(self._admitted(exchange, spec.input_bytes + spec.output_bytes))
            permit.price(spec.flops)
            staging = self._stage(message.inputs(), spec, inside)
            await message.receive(body, staging.views(staging.inputs).values())
        exchange.facts.update(backend=backend, shapes={name: list(p.shape) for name, p in staging.inputs.items()})

        job = Job(exchange.request_id, spec, backend, staging, Timings(exchange.arrived), deadline, priority)
        answer = await self._run(job, body.direct, receive)
        parts = await encode(job, answer, wanted, service.codec)
        if job.late:
            raise out_of_time()
        return job, answer, wanted, parts

    @contextmanager
    def _admitted(self, exchange: Exchange, nbytes: int) -> Iterator[Permit]:
        """Inside the limits, and counted until it is over. Raises Refusal 429."""
        metrics = self._service.metrics
        with self._service.admission.permit(nbytes) as permit:
            metrics.accepted()
            try:
                yield permit
            except ClientGoneError:
                metrics.left("cancelled")
                raise
            except BaseException:
                metrics.left("refused")
                raise
            else:
                metrics.left("answered" if exchange.code is None else "cancelled")

    def _stage(self, inputs: list[tuple[str, TensorInfo]], spec: Spec, inside: ExitStack) -> Staging:
        """The request's memory, until its answer has left. Raises Refusal 429."""
        staging = Staging.take(self._service.pool, inputs, spec.outputs)
        inside.callback(staging.release)
        return staging

    def _backend(self, spec: Spec, device: DeviceInfo, wanted: Encoding) -> str:
        """The backend that will run `spec`, once that is known to fit. Raises Refusal 413 and 422."""
        try:
            backend = choose_backend(spec, device.backends)
        except ProblemError as error:
            raise invalid(error.errors) from None
        settings = self._service.settings
        check_size(spec, device.memory, settings.sequence_limit)
        if wanted.is_json and spec.output_bytes > settings.json_limit:
            limit = settings.json_limit
            raise Refusal("work_too_large", f"an answer of {spec.output_bytes} bytes is over JSON's limit of {limit}")
        return backend

    async def _run(self, job: Job, direct: Direct | None, receive: Receive) -> Answer:
        """The engine's answer, unless the deadline passes or the client goes first: then the job is dropped."""
        answer = self._service.engine.submit(job)

        def give_up(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        with ExitStack() as inside:
            if direct is not None:
                inside.enter_context(direct.watch(lambda: give_up(ClientGoneError())))
            else:
                gone = asyncio.ensure_future(receive())  # behind the body comes http.disconnect alone
                gone.add_done_callback(lambda _: give_up(ClientGoneError()))
                inside.callback(gone.cancel)
            if (left := job.remaining()) is not None:
                timer = asyncio.get_running_loop().call_later(left, lambda: give_up(out_of_time()))
                inside.callback(timer.cancel)
            return await answer

    async def _send(
        self,
        send: Send,
        exchange: Exchange,
        direct: Direct | None,
        job: Job,
        answer: Answer,
        wanted: Encoding,
        parts: list[Part],
    ) -> None:
        """The answer, out of memory that will be reused: when this returns nobody sends from it any more."""
        job.timings.done = time.perf_counter()
        durations = job.timings.durations()
        self._service.metrics.took(job.timings.stages())
        exchange.facts.update({f"{name}_ms": ms for name, ms in durations.items()}, batch_size=answer.batch_size)
        size = sum(map(len, parts))
        headers = {
            "content-type": wanted.media_type,
            "content-length": str(size),
            "x-backend": job.backend,
            "x-batch-size": str(answer.batch_size),
            "server-timing": ", ".join(f"{name};dur={ms}" for name, ms in durations.items()),
        }
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        if direct is None:  # another server: it promises nothing, and gets a copy
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            await send({"type": "http.response.body", "body": b"".join(parts), "more_body": False})
            return
        settings = self._service.settings
        exchange.status, exchange.bytes_out = 200, size
        fields.append((b"x-request-id", exchange.request_id.encode()))
        if not await direct.answer(200, fields, parts, settings.body_timeout + size / settings.body_rate):
            exchange.code = "answer_timeout"


async def _refuse(send: Send, exchange: Exchange, refusal: Refusal, body: Body) -> None:
    """Answer, and let a client that is still sending read the answer before the connection closes."""
    if body.complete:
        await send_refusal(send, exchange, refusal)
        return
    refusal.headers["Connection"] = "close"
    await send_refusal(send, exchange, refusal, more=True)
    if refusal.code != "body_timeout":
        await body.drain()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _deadline(headers: Headers, settings: Settings) -> float | None:
    """From X-Timeout-Ms, in `time.monotonic` seconds. Raises Refusal 422."""
    text = headers.get("x-timeout-ms")
    if text is None:
        ms = settings.default_timeout_ms
    elif not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) > 0):
        raise invalid([("X-Timeout-Ms", "must be a positive integer of milliseconds")])
    else:
        ms = min(int(text), settings.max_timeout_ms)
    return time.monotonic() + ms / 1000 if ms else None


def _priority(headers: Headers) -> int:
    """From X-Priority. Raises Refusal 422."""
    text = headers.get("x-priority", "0")
    if len(text) != 1 or text not in "0123456789":
        raise invalid([("X-Priority", "must be an integer from 0 to 9")])
    return int(text)
