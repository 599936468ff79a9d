"""The steps of a call to an engine: authorize, begin, read, plan, admit, stage, submit, write.

A route is one function that takes a `Request` through these steps in this order. A step raises Refusal to end the
request with an error, and ClientGoneError if the client has disconnected. Routes are plain ASGI applications, so that
they can check a request's head and refuse the request before its body arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from flashpoint_contract.options import Direction
from flashpoint_contract.tensors import TensorInfo
from flashpoint_contract.wording.sizes import in_bytes
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.message import Format, TensorMessage, text_bytes
from flashpoint_server.formats.negotiation import formats
from flashpoint_server.http.body import MOST_AT_ONCE, ClientGoneError, Part, RequestBody
from flashpoint_server.http.envelope import send_refusal
from flashpoint_server.http.request import PARTS, Request, request_of
from flashpoint_server.ipc.bodies import Body, CacheRef, Recall, Save
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price, price_of
from flashpoint_server.ipc.staging import Layout
from flashpoint_server.plan import Kind, Plan
from flashpoint_server.refusal import Refusal, invalid, out_of_time
from flashpoint_server.service import Service

KEY_LENGTH = 128  # maximum characters of an Idempotency-Key
_DIGITS = 15  # maximum digits of milliseconds: 30,000 years, more than any setting


Handler = Callable[[Service, Request], Awaitable[None]]
# Returns the outputs that the answer contains as text, not as bytes. None stands for an answer that has none.
Numbers = Callable[[Plan], Sequence[TensorInfo]] | None
Compute = Callable[[Service, Request, TensorMessage, Numbers], Awaitable[Job]]
MakeBody = Callable[[Scope, Receive, Mapping[str, str], Settings], RequestBody]


@dataclass(eq=False)
class Route:
    """The ASGI application of one endpoint. `handle` takes a request through the steps and sends the answer."""

    service: Service
    handle: Handler
    make_body: MakeBody = RequestBody

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = request_of(scope)
        request.query = scope["query_string"].decode("latin-1")
        request.send = send
        request.body = body = self.make_body(scope, receive, request.headers, self.service.settings)
        try:
            try:
                await self.handle(self.service, request)
            except BaseException as error:
                request.end(type(error))
                raise
            request.end(None)
        except Refusal as refusal:
            await _refuse(request, refusal)
        except MemoryError:
            await _refuse(request, Refusal("out_of_memory", "the HTTP process ran out of memory for this request"))
        finally:
            request.bytes_in = max(request.bytes_in, body.received)
            del request.body, request.send  # they lead back to it: only the garbage collector frees a reference cycle


async def _refuse(request: Request, refusal: Refusal) -> None:
    """Send an error, and discard the rest of the body: a client that is still sending can then read the error.

    The connection is kept if the rest is short, and otherwise closed.
    """
    body, send = request.body, request.send
    slow = refusal.code == "body_timeout"
    if body.complete or body.absent or (body.nearly_there and not slow and "Connection" not in refusal.headers):
        await send_refusal(send, request, refusal)
        return
    refusal.headers["Connection"] = "close"
    await send_refusal(send, request, refusal, more=True)
    if not slow:
        await body.drain()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def begin(service: Service, request: Request) -> DeviceInfo:
    """Read deadline and priority, check the idempotency key, and register the request for the graceful shutdown.

    Raises Refusal 422 and 503.
    """
    request.body.deadline = deadline_of(request.headers, service.settings)
    if "x-priority" in request.headers:
        request.priority = priority_of(request.headers)
    if "idempotency-key" in request.headers:
        idempotency_key(request)  # a call that does not write refuses a wrong one, too
    request.device = service.begin()
    request.ends.append(service.end)
    return request.device


def idempotency_key(request: Request) -> str:
    """Return the Idempotency-Key; "" if there is none. Raises Refusal 422."""
    key = request.headers.get("idempotency-key", "")
    if len(key) > KEY_LENGTH or not key.isprintable():
        raise invalid([("Idempotency-Key", f"must be at most {KEY_LENGTH} printable characters")])
    return key


def limit(service: Service, request: Request, given: Format) -> None:
    """Check the body's length, and admit the request if its format reads the whole body. Raises Refusal 413 and 429."""
    body = request.body
    if given.whole:
        body.limit = service.settings.json_limit
    body.check_length(body.length)
    if given.whole:
        admit(service, request, body.length or body.limit)


async def read(service: Service, request: Request, given: Format, direction: Direction | None = None) -> TensorMessage:
    """Return the message, after reading as much of the body as its format needs for that. Raises Refusal.

    Its options are checked if it has a `direction`: if it is a call of attention or its gradients.
    """
    limit(service, request, given)
    return await given.read(request, service.settings, service.codec, direction)


def admit(service: Service, request: Request, nbytes: int) -> None:
    """Admit the request, and count it with `nbytes` of tensors until it ends. Raises Refusal 429."""
    service.admission.enter(request, nbytes, request.caller.quota)
    request.ends.append(partial(_leave, service, request))
    service.metrics.accepted()


def _leave(service: Service, request: Request) -> None:
    """Count the end of an admitted request."""
    service.admission.leave(request)
    if (error := request.error) is not None:
        how = "cancelled" if issubclass(error, ClientGoneError) else "refused"
    else:
        how = "answered" if request.code is None else "cancelled"
    service.metrics.left(how)


def stage(service: Service, request: Request, layout: Layout) -> Job:
    """Return a job with staging memory, which is released when the request ends. Raises Refusal 413 and 429."""
    job = Job.stage(service.pool, layout)
    request.ends.append(job.release)
    return job


def every(plan: Plan) -> Sequence[TensorInfo]:
    """Return all outputs of an answer."""
    return list(plan.answers.values())


async def attention(service: Service, request: Request, direction: Direction, planners: Mapping[Kind, Compute]) -> None:
    """Answer a call of attention or its gradients. `planners` has a function for each kind of call except "plain".

    Raises Refusal and ClientGoneError.
    """
    service.authorize(request, "attention")
    given, wanted = formats(request.headers)
    begin(service, request)
    message = await read(service, request, given, direction)
    if message.kind == "plain":
        plan = service.plans.of(message, request.device)
        job = await carry_out(service, request, message, plan, every if wanted.whole else None, plan.price)
    else:
        job = await planners[message.kind](service, request, message, every if wanted.whole else None)
    parts = await wanted.write(request, job, service.codec)
    await write(service, request, job, parts, {"content-type": wanted.media_type})


async def carry_out(
    service: Service,
    request: Request,
    message: TensorMessage,
    plan: Plan,
    numbers: Numbers,
    price: Price,
    *,
    seed: int | None = None,
    cache_ref: CacheRef | None = None,
    saved: Callable[[Mapping[str, Any]], Save | Recall] | None = None,
    incarnation: int = 0,
    lost: str = "cache_lost",
) -> Job:
    """Admit, stage and submit a planned call, at the cost `price`.

    `seed` is the seed of dropout if it is not the message's. `cache_ref` names the caches of a call over caches.
    `saved` gets the values of the index tensors, by name, and returns `Submit.saved`. `incarnation` and `lost` are
    those of `Job`. Raises Refusal and ClientGoneError.
    """
    body, spec = request.body, plan.spec
    request.plan = plan
    text = () if numbers is None else numbers(plan)
    if text:
        _check_text(text, service.settings.json_limit)
    if not request.inside:
        admit(service, request, plan.nbytes)
    if text:
        service.admission.grow(request, text_bytes(text))
    pace = service.engine.pace if body.deadline is not None else 0.0
    service.admission.charge(request, price, body.deadline, pace)
    if message.in_regions:
        plan = request.plan = plan.placed(Layout.of(message.inputs, spec.outputs, message.elsewhere(spec)))
    job = stage(service, request, plan)
    views = job.views(job.inputs)
    await message.receive(request, views)
    index = job.index(views) if plan.indexed else {}
    if index and cache_ref is None:  # the index tensors have arrived, and with their values the cost is exact
        service.admission.correct(request, price_of(spec, plan.backend, request.device, index))
    request.facts.update(backend=plan.backend, shapes=plan.shapes)
    seed, keeping = message.seed if seed is None else seed, None if saved is None else saved(index)
    return await submit(service, request, job, plan.packed, request.price, incarnation, lost, seed, cache_ref, keeping)


def _check_text(text: Sequence[TensorInfo], limit: int) -> None:
    """Raise Refusal 413 if tensors that an answer contains as text have more than `limit` bytes as numbers."""
    if (size := sum([info.nbytes for info in text])) > limit:
        detail = f"a JSON answer of {in_bytes(size)} exceeds the limit of {in_bytes(limit)}: request a binary answer"
        raise Refusal("work_too_large", detail)


async def submit(
    service: Service, request: Request, job: Job, body: Body, price: Price, incarnation: int = 0,
    lost: str = "cache_lost", seed: int | None = None, cache_ref: CacheRef | None = None,
    saved: Save | Recall | None = None,
) -> Job:  # fmt: skip
    """Submit a job, whose inputs have arrived, with the work `body`. Return it when it has the engine's answer.

    `incarnation` and `lost` are those of `Job`, the arguments behind them those of `Submit`. Raises Refusal 504 at the
    deadline, and ClientGoneError if the client disconnects.
    """
    job.priority, job.incarnation, job.lost = request.priority, incarnation, lost
    job.ask(request.request_id, body, price, request.body.deadline, seed, cache_ref, saved)
    answer = service.engine.submit(job)

    def give_up(error: Exception) -> None:
        if not answer.done():
            answer.set_exception(error)

    timer = None
    if (left := job.remaining()) is not None:
        timer = asyncio.get_running_loop().call_later(left, lambda: give_up(out_of_time()))
    try:
        whole = request.body.complete or request.body.absent  # else the body's next read notices a disconnection
        with request.body.watching(lambda: give_up(ClientGoneError())) if whole else nullcontext():
            await answer
            return job
    finally:
        if timer is not None:
            timer.cancel()


async def write(
    service: Service, request: Request, job: Job, parts: list[Part], fields: Mapping[str, str]
) -> dict[str, float]:
    """Send the answer to a job, encoded as `parts`, with the header `fields`. Return the seconds of each stage.

    Copies to and from a GPU are separate stages; for the caller, `compute` includes them. Raises Refusal 504 and
    ClientGoneError.
    """
    if job.remaining() == 0.0:
        raise out_of_time()
    done = job.done
    marks = request.marks = request.arrived, job.queued, done.began, done.ended, time.perf_counter()
    stages = {name: end - start for name, start, end in zip(PARTS, marks, marks[1:], strict=False)}
    timing = []
    for name, seconds in stages.items():
        request.facts[f"{name}_ms"] = ms = round(seconds * 1000, 3)
        timing.append(f"{name};dur={ms}")
    stages["copy_in"], stages["copy_out"] = done.copy_in, done.copy_out
    stages["compute"] -= done.copy_in + done.copy_out
    request.facts["batch_size"], request.launch = done.batch_size, done.launch
    headers = {
        **fields,
        "x-backend": request.plan.backend,
        **({"x-kernel": kernel} if (kernel := done.metadata.get("kernel")) else {}),
        "x-batch-size": str(done.batch_size),
        "server-timing": ", ".join(timing),
    }
    await reply(service, request, parts, headers)
    service.metrics.took(stages)
    return stages


async def reply(service: Service, request: Request, parts: list[Part], fields: Mapping[str, str]) -> None:
    """Send status 200 with the body `parts`. When this returns, the memory of `parts` is no longer in use.

    Raises ClientGoneError if the client has disconnected.
    """
    direct = request.body.direct
    size = sum(map(len, parts))
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    raw.append((b"content-length", b"%d" % size))
    if direct is None:  # another ASGI server may keep the memory longer, so it gets a copy
        await request.send({"type": "http.response.start", "status": 200, "headers": raw})
        for part in parts:
            for start in range(0, len(part), MOST_AT_ONCE):
                piece = bytes(part[start : start + MOST_AT_ONCE])
                await request.send({"type": "http.response.body", "body": piece, "more_body": True})
        await request.send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    if direct.gone:
        raise ClientGoneError
    request.status, request.bytes_out = 200, size
    patience = service.settings.body_timeout + size / service.settings.body_rate
    if not await direct.answer(request.answer_fields(raw), parts, patience):
        request.code = "answer_timeout"


def deadline_of(headers: Mapping[str, str], settings: Settings) -> float | None:
    """Return the deadline from X-Timeout-Ms, in `time.monotonic` seconds; None if there is none. Raises Refusal 422."""
    text = headers.get("x-timeout-ms")
    if text is None:
        ms = settings.default_timeout_ms
    elif not (text.isascii() and text.isdecimal() and (digits := text.lstrip("0"))):
        raise invalid([("X-Timeout-Ms", "must be a positive integer of milliseconds")])
    else:
        ms = settings.max_timeout_ms if len(digits) > _DIGITS else min(int(digits), settings.max_timeout_ms)
    return time.monotonic() + ms / 1000 if ms else None


def earlier(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two deadlines. None means no deadline."""
    return min((deadline for deadline in (one, other) if deadline is not None), default=None)


def priority_of(headers: Mapping[str, str]) -> int:
    """Return the priority from X-Priority, 0 to 9. Raises Refusal 422."""
    text = headers.get("x-priority", "0")
    if len(text) != 1 or text not in "0123456789":
        raise invalid([("X-Priority", "must be an integer from 0 to 9")])
    return int(text)
