"""POST /verify: compare a backend's answers, or the caller's, with float64."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from flashpoint_contract import strictjson
from flashpoint_contract.options import OPTIONS, Direction, Options
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.verify import VerifyRequest
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.sse import MEDIA_TYPE as EVENT_STREAM
from flashpoint_contract.tensors import FORWARD_TENSORS, INPUT_TENSORS, JUDGED, TensorInfo, refusals
from flashpoint_contract.wording.hints import each_meant
from flashpoint_contract.wording.sizes import in_flops, longest
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.json import JSON, JsonMessage
from flashpoint_server.formats.message import TensorMessage
from flashpoint_server.formats.negotiation import HEARTBEAT_SECONDS, request_format, takes_events
from flashpoint_server.http.body import ClientGoneError
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.bodies import VerifyCall
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price, verification_price
from flashpoint_server.ipc.staging import Layout
from flashpoint_server.plan import Named, check_size, refuse_invalid
from flashpoint_server.refusal import Refusal, invalid
from flashpoint_server.routes.pipeline import (
    admit,
    begin,
    limit,
    reply,
    stage,
    submit,
)
from flashpoint_server.service import Service

_PROBLEM = tuple(name for name in INPUT_TENSORS if name not in JUDGED)
IN_FLOAT64 = 8  # bytes of memory needed per byte of a problem: for its tensors, answers and gradients in float64
DRAWN_LIMIT = 1 << 16  # maximum bytes of a request that describes a problem to draw; most have a few hundred bytes


async def verify(service: Service, request: Request) -> None:
    """Answer with a report in JSON, or with progress events and then the report. Raises Refusal and ClientGoneError.

    The request has tensors, like one to /attention, or it is a JSON object with a `shape`. In the second case the
    engine draws the tensors from a seed.
    """
    body = request.body
    service.authorize(request, "verify")
    given = request_format(request.headers)
    device = begin(service, request)
    limit(service, request, given)
    text = await body.text() if given is JSON else None
    drawn: VerifyRequest | None = None
    message: TensorMessage | None = None
    inputs: Named = ()
    if text is not None and len(text) <= DRAWN_LIMIT:
        drawn = await service.codec.parse(body, _drawn, text)
    if drawn is not None:
        _check_options(drawn)
        request_json, price = drawn.model_dump_json().encode(), _drawn_price(drawn, device, service.settings)
    else:
        if text is not None:
            message = await JsonMessage.parse(text, service.codec, body)
        else:
            message = await given.read(request, service.settings, service.codec, None)
        inputs = message.inputs
        request_json, price = _check(message, device, service.settings)
    if not request.inside:
        admit(service, request, sum(info.nbytes for _, info in inputs))
    service.admission.charge(request, price)
    job = stage(service, request, Layout.of(inputs, {}))
    if message is not None:
        await message.receive(request, job.views(job.inputs))
    events = takes_events(request.headers)
    run = partial(submit, service, request, job, VerifyCall(request_json, events), price)
    if events:
        await _stream(request, job, run)
    else:
        await reply(service, request, [(await run()).report], {"content-type": jsonwire.MEDIA_TYPE})


async def _stream(request: Request, job: Job, run: Callable[[], Coroutine[Any, Any, Job]]) -> None:
    """Send the newest VerifyProgress as an event whenever there is one, then the report.

    The answer starts with the first event. Then send a comment after each HEARTBEAT_SECONDS without progress: if the
    client has closed the connection, its system answers this write with a reset. Without a write, the server could not
    tell this client from one that has only closed its sending direction.

    A verification that is refused before it runs has an error status; one that fails later ends with a problem event.
    Raises Refusal and ClientGoneError.
    """
    newest: bytes | None = None  # the newest progress that was not sent yet
    news = asyncio.Event()

    def proceeds(progress: bytes) -> None:
        nonlocal newest
        newest = progress
        news.set()

    job.progress = proceeds
    answer = asyncio.create_task(run())
    answer.add_done_callback(lambda _: news.set())
    try:
        while True:
            try:
                await asyncio.wait_for(news.wait(), HEARTBEAT_SECONDS)
            except TimeoutError:
                if request.status is not None:
                    await request.send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
                continue
            news.clear()
            done, progress, newest = answer.done(), newest, None
            if progress is not None:  # sent even if the report has also arrived
                await _send_event(request, "progress", progress)
            if done:
                break
        try:
            report = answer.result().report
        except Refusal as refusal:
            if request.status is None:
                raise
            request.code = refusal.code
            document = {"kind": "problem", "problem": refusal.document(request.request_id)}
            await _send_event(request, "problem", json.dumps(document).encode())
        except ClientGoneError:
            if request.status is not None:  # status 200 is already sent, but the log line shows this code
                request.code = "client_gone"
            raise
        else:
            await _send_event(request, "report", b'{"kind":"report","report":%s}' % report)
        await request.send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        answer.cancel()


async def _send_event(request: Request, kind: str, data: bytes) -> None:
    if request.status is None:
        headers = [(b"content-type", EVENT_STREAM.encode())]
        await request.send({"type": "http.response.start", "status": 200, "headers": headers})
    frame = b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
    await request.send({"type": "http.response.body", "body": frame, "more_body": True})


def _check_options(options: AttentionOptions) -> None:
    """Raise Refusal 422 for options that have no effect on a verification."""
    given = [name for name, option in OPTIONS.items() if getattr(options, name) != option.default]
    if refused := refusals("verify", given):
        raise invalid(refused)


def _check(message: TensorMessage, device: DeviceInfo, settings: Settings) -> tuple[bytes, Price]:
    """Return the options of a message with tensors, in JSON, and the cost of its verification.

    Raises Refusal 413 and 422.
    """
    infos = dict(message.inputs)
    known = (*_PROBLEM, *JUDGED)
    if unknown := [name for name in infos if name not in known]:
        raise invalid(
            (name, f"unknown tensor{hint or '; known are ' + ', '.join(known)}")
            for name, hint in each_meant(unknown, known)
        )
    if refused := refusals(message.surface, infos):
        raise invalid(refused)
    direction: Direction = "backward" if "do" in infos else "forward"
    names = _PROBLEM if direction == "backward" else FORWARD_TENSORS
    with refuse_invalid():
        options = AttentionOptions.model_validate(message.options)
        _check_options(options)
        problem = {name: info for name, info in infos.items() if name in names}
        spec = plan(problem, Options(**options.model_dump()), direction)
    return options.model_dump_json().encode(), _price(spec, device, settings)


def _price(spec: Spec, device: DeviceInfo, settings: Settings) -> Price:
    """Return the cost of a verification. Raises Refusal 413 if it needs too much memory or too many FLOPs."""
    check_size(spec, device.memory // IN_FLOAT64, settings.sequence_limit)
    price = verification_price(spec, device)
    if price.flops > (limit := settings.verify_flops):
        raise Refusal(
            "work_too_large", f"the verification needs {in_flops(price.flops)}, over the limit of {in_flops(limit)}"
        )
    return price


def _drawn_price(request: VerifyRequest, device: DeviceInfo, settings: Settings) -> Price:
    """Return the cost of a problem to draw. Raises Refusal 422, and 413 with the largest lengths that fit."""
    spec = _spec_of(request)
    try:
        return _price(spec, device, settings)
    except Refusal as refusal:
        shape = request.shape

        def fits(length: int) -> bool:
            sizes = {"q_len": min(shape.q_len, length), "kv_len": min(shape.kv_len, length)}
            shorter = request.model_copy(update={"shape": shape.model_copy(update=sizes)})
            try:
                _price(_spec_of(shorter), device, settings)
            except Refusal:
                return False
            return True

        detail = f"{refusal.detail}; {longest(fits, max(shape.q_len, shape.kv_len))}"
        raise Refusal(refusal.code, detail) from None


def _drawn(text: bytes) -> VerifyRequest | None:
    """Return the request if it describes a problem to draw; None if it has tensors. Raises Refusal 422."""
    try:
        document = strictjson.loads(text)
    except ValueError:
        return None  # the parser of tensors reports the error
    if not isinstance(document, dict) or "shape" not in document:
        return None
    with refuse_invalid(VerifyRequest.model_fields):
        request: VerifyRequest = VerifyRequest.model_validate_json(text)
    return request


@refuse_invalid()
def _spec_of(request: VerifyRequest) -> Spec:
    """Return the `Spec` of the problem that the engine will draw, to estimate its cost. Raises Refusal 422."""
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
    return plan(infos, Options(causal=request.causal), direction)
