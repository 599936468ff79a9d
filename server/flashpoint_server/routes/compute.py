"""What the calls that compute share: from the socket to the engine and back, refused from the head where that decides.

Plain ASGI, for a request is answered before its body has come.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from flashpoint_kernels.spec import TensorInfo
from flashpoint_server.access.admission import Permit
from flashpoint_server.access.keys import Caller
from flashpoint_server.config.settings import Settings
from flashpoint_server.exchange import Exchange
from flashpoint_server.http.body import Body, ClientGoneError
from flashpoint_server.http.envelope import send_refusal
from flashpoint_server.http.places import Part
from flashpoint_server.ipc.job import Answer, Job
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.regions import Region
from flashpoint_server.ipc.staging import Staging
from flashpoint_server.refusal import Refusal, invalid, out_of_time
from flashpoint_server.service import Service

_NOTHING: Mapping[str, tuple[Region, int]] = {}


@dataclass(eq=False)
class Call:
    """One request on its way through a route; `inside` ends what it has begun."""

    exchange: Exchange
    body: Body
    receive: Receive
    send: Send
    inside: ExitStack
    caller: Caller | None = None  # once it is known who asks

    def waiting_since(self) -> float | None:
        """When its body ended, in `time.monotonic` seconds; None before that, and once its answer has begun."""
        return self.body.ended if self.exchange.status is None else None


class ComputeRoute(ABC):
    """The ASGI application of a call that an engine answers."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        body = self.body(scope, receive, exchange)
        try:
            with ExitStack() as inside:
                await self.serve(Call(exchange, body, receive, send, inside))
        except Refusal as refusal:
            await _refuse(send, exchange, refusal, body)
        except MemoryError:
            said = Refusal("out_of_memory", "the HTTP process ran out of memory for this request")
            await _refuse(send, exchange, said, body)
        finally:
            exchange.bytes_in = max(exchange.bytes_in, body.received)

    def body(self, scope: Scope, receive: Receive, exchange: Exchange) -> Body:
        return Body(scope, receive, exchange.headers, self.service.settings)

    @abstractmethod
    async def serve(self, call: Call) -> None:
        """Answer. Raises Refusal and ClientGoneError before anything of the answer is sent."""

    def begin(self, inside: ExitStack) -> DeviceInfo:
        """The device, and the service waits for this request before it stops. Raises Refusal 503."""
        device = self.service.begin()
        inside.callback(self.service.end)
        return device

    def admit(self, call: Call, nbytes: int) -> Permit:
        """Inside the limits, and counted until it is over. Raises Refusal 429."""
        caller = call.caller
        assert caller is not None  # who asks is looked at first
        permit = call.inside.enter_context(self.service.admission.permit(nbytes, caller.quota, call.waiting_since))
        metrics = self.service.metrics
        metrics.accepted()

        def left(kind: type[BaseException] | None, *_: object) -> None:
            if kind is not None:
                metrics.left("cancelled" if issubclass(kind, ClientGoneError) else "refused")
            else:
                metrics.left("answered" if call.exchange.code is None else "cancelled")

        call.inside.push(left)
        return permit

    def stage(
        self,
        inputs: list[tuple[str, TensorInfo]],
        outputs: Mapping[str, TensorInfo],
        inside: ExitStack,
        elsewhere: Mapping[str, tuple[Region, int]] = _NOTHING,
    ) -> Staging:
        """The request's memory, until its answer has left. Raises Refusal 429."""
        staging = Staging.take(self.service.pool, inputs, outputs, elsewhere)
        inside.callback(staging.release)
        return staging

    async def run(self, job: Job, call: Call) -> Answer:
        """The engine's answer, unless the deadline passes or the client goes first: then the job is dropped."""
        direct = call.body.direct
        answer = self.service.engine.submit(job)

        def give_up(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        gone = timer = None
        if direct is not None:
            direct.watch(lambda: give_up(ClientGoneError()))
        else:
            gone = asyncio.ensure_future(call.receive())  # behind the body comes http.disconnect alone
            gone.add_done_callback(lambda _: give_up(ClientGoneError()))
        if (left := job.remaining()) is not None:
            timer = asyncio.get_running_loop().call_later(left, lambda: give_up(out_of_time()))
        try:
            return await answer
        finally:
            if direct is not None:
                direct.unwatch()
            if gone is not None:
                gone.cancel()
            if timer is not None:
                timer.cancel()

    async def reply(self, call: Call, fields: list[tuple[bytes, bytes]], parts: list[Part]) -> None:
        """Answer 200 out of memory that will be reused: when this returns nobody sends from it any more.

        Raises ClientGoneError where there is nobody to answer.
        """
        exchange, direct, settings = call.exchange, call.body.direct, self.service.settings
        size = sum(map(len, parts))
        fields.append((b"content-length", b"%d" % size))
        if direct is None:  # another server: it promises nothing, and gets a copy
            await call.send({"type": "http.response.start", "status": 200, "headers": fields})
            await call.send({"type": "http.response.body", "body": b"".join(parts), "more_body": False})
            return
        if direct.gone:
            raise ClientGoneError
        exchange.status, exchange.bytes_out = 200, size
        fields.append((b"x-request-id", exchange.request_id.encode()))
        if not await direct.answer(200, fields, parts, settings.body_timeout + size / settings.body_rate):
            exchange.code = "answer_timeout"


async def _refuse(send: Send, exchange: Exchange, refusal: Refusal, body: Body) -> None:
    """Answer, and let a client that is still sending read the answer: the connection closes behind a long body only."""
    last = refusal.code == "body_timeout" or "Connection" in refusal.headers
    if body.complete or (body.nearly_there and not last):
        await send_refusal(send, exchange, refusal)
        return
    refusal.headers["Connection"] = "close"
    await send_refusal(send, exchange, refusal, more=True)
    if refusal.code != "body_timeout":
        await body.drain()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


_DIGITS = 15  # of milliseconds: 30,000 years, more than any setting


def deadline_of(headers: Mapping[str, str], settings: Settings) -> float | None:
    """From X-Timeout-Ms, in `time.monotonic` seconds. Raises Refusal 422."""
    text = headers.get("x-timeout-ms")
    if text is None:
        ms = settings.default_timeout_ms
    elif not (text.isascii() and text.isdecimal() and (digits := text.lstrip("0"))):
        raise invalid([("X-Timeout-Ms", "must be a positive integer of milliseconds")])
    else:
        ms = settings.max_timeout_ms if len(digits) > _DIGITS else min(int(digits), settings.max_timeout_ms)
    return time.monotonic() + ms / 1000 if ms else None


def priority_of(headers: Mapping[str, str]) -> int:
    """From X-Priority. Raises Refusal 422."""
    text = headers.get("x-priority", "0")
    if len(text) != 1 or text not in "0123456789":
        raise invalid([("X-Priority", "must be an integer from 0 to 9")])
    return int(text)
