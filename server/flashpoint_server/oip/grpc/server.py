"""The gRPC port, and the bridge to the application: metadata become header fields, and a message becomes a body.

All methods are registered as streaming methods; a unary call is a stream of one message. So a message is read only when
its route needs it and there is memory for it (arrivals.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp, Message

from flashpoint_server.http.envelope import Envelope
from flashpoint_server.http.request import HTTP_ALONE, request_of
from flashpoint_server.oip.grpc import protos
from flashpoint_server.oip.grpc.arrivals import LARGEST_MESSAGE, Hold, Memory
from flashpoint_server.oip.grpc.infer import EXTENSION, PATH, Incoming, MessageBody, infer_grpc
from flashpoint_server.oip.grpc.methods import METHODS, SERVICE, Method
from flashpoint_server.oip.infer import Counted
from flashpoint_server.oip.statistics import Statistics
from flashpoint_server.refusal import Refusal
from flashpoint_server.routes.pipeline import Route
from flashpoint_server.service import Service

SMALL_CALLS = 64  # calls allowed in addition to the queue limit, so that probes are answered when the queue is full
MOST_DETAILS = 1024  # maximum characters of an error, each up to three bytes: clients accept a few KiB of metadata
PUNCTUAL = 0.9  # part of the ping interval that must have passed: a client's timer or the network may shorten one
_WHOLE = 1  # bit mask of compression algorithms: no compression, because gRPC does not limit the decompressed size

# The gRPC status (its name in `grpc.StatusCode`) of each error code of the server.
STATUSES = {
    "malformed_body": "INVALID_ARGUMENT",
    "malformed_head": "INVALID_ARGUMENT",
    "unauthorized": "UNAUTHENTICATED",
    "forbidden": "PERMISSION_DENIED",
    "cross_site": "PERMISSION_DENIED",
    "not_found": "NOT_FOUND",
    "method_not_allowed": "UNIMPLEMENTED",
    "not_acceptable": "UNIMPLEMENTED",
    "body_timeout": "DEADLINE_EXCEEDED",
    "body_too_large": "RESOURCE_EXHAUSTED",  # the status that gRPC uses for a message over its own limit
    "work_too_large": "INVALID_ARGUMENT",
    "unsupported_media_type": "UNIMPLEMENTED",
    "host_not_allowed": "PERMISSION_DENIED",
    "invalid_request": "INVALID_ARGUMENT",
    "backend_renamed": "INVALID_ARGUMENT",
    "idempotency_key_reused": "INVALID_ARGUMENT",
    "queue_full": "RESOURCE_EXHAUSTED",
    "key_limit": "RESOURCE_EXHAUSTED",
    "head_too_large": "RESOURCE_EXHAUSTED",
    "internal_error": "INTERNAL",
    "transfer_encoding": "UNIMPLEMENTED",
    "not_ready": "UNAVAILABLE",
    "draining": "UNAVAILABLE",
    "out_of_memory": "UNAVAILABLE",
    "engine_lost": "UNAVAILABLE",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "cache_not_found": "NOT_FOUND",
    "cache_lost": "NOT_FOUND",
    "saved_not_found": "NOT_FOUND",
    "saved_lost": "NOT_FOUND",
    "cache_position": "OUT_OF_RANGE",
    "cache_dropped": "OUT_OF_RANGE",
    "cache_full": "FAILED_PRECONDITION",
    "cache_elsewhere": "FAILED_PRECONDITION",
    "cache_stale": "ABORTED",
    "cache_memory": "RESOURCE_EXHAUSTED",
}

_KEY = "authorization"

Behaviour = Callable[[object, Any], Awaitable[bytes]]


class RpcReply(NamedTuple):
    """The ASGI application's answer to a call. `code` is the error code, or None if there is no error."""

    status: int
    fields: dict[str, str]
    body: bytes
    code: str | None


class RpcServer:
    """gRPC's server, whose methods call the ASGI application. `port` is the port it listens on."""

    def __init__(self, app: ASGIApp, service: Service, statistics: Statistics, address: str) -> None:
        """Raises OSError if the server cannot listen on `address`, whose port `cli.ports` has reserved."""
        settings = self._settings = service.settings
        self._files = service.files
        memory = Memory(settings, service.keys.locked, service.counts)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", memory.largest),
                ("grpc.http2.bdp_probe", 0),  # otherwise some MiB of each message arrive before it is read
                ("grpc.max_send_message_length", LARGEST_MESSAGE),
                # The TLS handshake, and the client's first HTTP/2 frame.
                ("grpc.server_handshake_timeout_ms", _milliseconds(settings.header_timeout)),
                # A client with more pings gets GOAWAY, and loses its calls. Pings are allowed without calls, too.
                ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(PUNCTUAL * settings.grpc_ping_interval)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.compression_enabled_algorithms_bitset", _WHOLE),
                ("grpc.so_reuseport", 1),  # it joins the reservation
            ],
            maximum_concurrent_rpcs=settings.queue_limit + SMALL_CALLS,
        )
        route = Counted(Route(service, partial(infer_grpc, statistics=statistics), MessageBody), statistics)
        infer = _infer(Envelope(route, {PATH}, service.ended), memory)
        for name, methods in METHODS.items():
            classes = protos.methods(name)
            behaviours = {
                method: _small(app, service, memory, described, *classes[method])
                for method, described in methods.items()
            }
            if name == SERVICE:
                behaviours[PATH.rpartition("/")[2]] = infer
            handlers = {method: grpc.stream_unary_rpc_method_handler(take) for method, take in behaviours.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        try:
            self.port: int = self._listen(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error

    def _listen(self, address: str) -> int:
        if self._settings.tls_cert is None:
            return int(self._server.add_insecure_port(address))
        self.reload()
        mutual = self._settings.tls_client_ca is not None
        credentials = grpc.dynamic_ssl_server_credentials(self._certificate, lambda: self._certificate, mutual)
        return int(self._server.add_secure_port(address, credentials))

    def reload(self) -> None:
        """Use the present certificate for new connections."""
        certificate = self._files.contents.certificate
        assert certificate is not None
        pair = certificate.key or certificate.cert, certificate.cert
        self._certificate = grpc.ssl_server_certificate_configuration([pair], certificate.client_ca)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Wait at most `seconds` for running calls, and end the rest."""
        await self._server.stop(seconds)


def _milliseconds(seconds: float) -> int:
    return max(1, int(1000 * seconds))


def _infer(app: ASGIApp, memory: Memory) -> Behaviour:
    async def behaviour(_: object, context: Any) -> bytes:
        incoming = Incoming.within(_reader(context), _hold(memory, counted=True), context.time_remaining())
        reply = await _ask(app, context, "POST", PATH, extension=incoming)
        return await _answered(reply, context)

    return behaviour


def _small(
    app: ASGIApp, service: Service, memory: Memory, method: Method, request_class: Any, answer_class: Any
) -> Behaviour:
    """Return gRPC's handler of a method with a small message, which must arrive within `--body-timeout`."""

    async def behaviour(_: object, context: Any) -> bytes:
        hold = _hold(memory, owner=_owner(service, context))
        try:
            came = await hold.read(_reader(context), _size, time.monotonic() + service.settings.body_timeout)
            message = request_class.FromString(came or b"")
            path, body = method.path(message), method.body(message)
        except TimeoutError:
            await _end(context, "DEADLINE_EXCEEDED", "the message arrived too slowly")
        except DecodeError:
            await _end(context, "INVALID_ARGUMENT", f"the message is not a {request_class.DESCRIPTOR.name}")
        except Refusal as refusal:
            await _end(context, STATUSES[refusal.code], refusal.detail)
        reply = await _ask(app, context, method.verb, path, body)
        if reply.status == 503 and method.unready is not None:
            document = method.unready
        else:
            document = method.answer(json.loads(await _answered(reply, context)))
        return bytes(ParseDict(document, answer_class(), ignore_unknown_fields=True).SerializeToString())

    return behaviour


def _hold(memory: Memory, **what: Any) -> Hold:
    """Return the `Hold` of this call. It is released when gRPC's task for the call ends: after the answer is sent."""
    hold = Hold(memory, **what)
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: hold.release())
    return hold


def _reader(context: Any) -> Callable[[], Awaitable[bytes | None]]:
    """Return a function that reads a message, or returns None if there is none.

    gRPC's iterator is not used, because it keeps a reference to the message for too long.
    """

    async def read() -> bytes | None:
        message = await context.read()
        return None if message is grpc.aio.EOF else message

    return read


def _owner(service: Service, context: Any) -> str:
    """Return the name of the call's API key, or '' without a valid key.

    The application refuses a call without a valid key later, if its route needs a key.
    """
    if not service.keys.locked:
        return ""
    try:
        return service.keys.find({name: value for name, value in context.invocation_metadata() if name == _KEY}).name
    except Refusal:
        return ""


def _size(message: bytes | None) -> int:
    return len(message or b"")


async def _ask(
    app: ASGIApp, context: Any, verb: str, path: str, body: bytes = b"", extension: Incoming | None = None
) -> RpcReply:
    """Return the application's answer to a call. Raises CancelledError if the caller has disconnected."""
    parts: list[bytes] = []
    begun: Message = {}
    came = [body] if extension is None else []  # with `extension`, the route reads the message itself

    async def receive() -> Message:
        if came:
            return {"type": "http.request", "body": came.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # gRPC cancels this task when the caller disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begun.update(message)
        else:
            parts.append(message.get("body", b""))

    metadata = [(name, value) for name, value in context.invocation_metadata() if isinstance(value, str)]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "method": verb,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in metadata],
        "client": None,
        "server": None,
        "extensions": {EXTENSION: extension},
    }
    await app(scope, receive, send)
    request = request_of(scope)
    if not begun:  # the application sent nothing
        raise asyncio.CancelledError
    fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in begun["headers"]}
    return RpcReply(begun["status"], fields, b"".join(parts), request.code)


async def _answered(reply: RpcReply, context: Any) -> bytes:
    """Return the body of an answer, or end the call if it is an error. Header fields become trailing metadata."""
    unsent = {"connection", "content-length", "content-type"} | HTTP_ALONE
    beside = {name: value for name, value in reply.fields.items() if name not in unsent}
    context.set_trailing_metadata(tuple(beside.items()))
    if reply.status != 200:
        document = json.loads(reply.body)
        detail = document.get("detail") or document.get("error")
        await _end(context, STATUSES[reply.code or "internal_error"], detail, context.trailing_metadata())
    return reply.body


async def _end(context: Any, status: str, detail: str, beside: tuple[tuple[str, str], ...] = ()) -> None:
    """End a call with an error.

    Raises CancelledError if the caller has disconnected, so that this is not logged as an error.
    """
    try:
        await context.abort(grpc.StatusCode[status], detail[:MOST_DETAILS], beside)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
