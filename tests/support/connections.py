"""Serve HTTP on a socket without an engine or other processes; the test runs the event loop turn by turn.

The route reads a safetensors message into memory of its own, waits until the test lets it answer, and sends the tensors
back. All code between the route and the socket is the server's.
"""

import asyncio
import json
import socket
from functools import partial
from types import SimpleNamespace

import uvloop
from uvicorn.server import ServerState

from flashpoint_contract import wire
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.formats.safetensors import SAFETENSORS
from flashpoint_server.http.ending import Config
from flashpoint_server.http.envelope import Envelope, refuse_outside
from flashpoint_server.http.half_closed import HalfClosed
from flashpoint_server.http.protocol import HttpProtocol
from flashpoint_server.observability.metrics import Metrics
from flashpoint_server.refusal import Refusal
from flashpoint_server.routes.pipeline import Route, deadline_of, reply, submit

HOUR = 3600  # seconds: no timeout expires during a slow test
TURNS = 8  # iterations of the event loop: enough to read all sent data and to send all possible answers
RELEASED = 0xAA  # the bytes that overwrite released memory
REFUSALS = {"early": "invalid_request", "staging": "queue_full", "late": "engine_lost"}
CALLBACKS = (
    "on_message_begin", "on_url", "on_header", "on_headers_complete", "headers_completed", "on_body",
    "on_message_complete",
)  # fmt: skip


class ShortOfMemory(HttpProtocol):
    """The server's HTTP protocol, in which one callback raises MemoryError once: the one of CALLBACKS named `lacking`.

    `hit` is then the number of the request (from 0) whose callback failed.
    """

    lacking = hit = None
    begun = -1  # the number of the request that the parser reads, from 0

    def _allocate(self, callback):
        if self.lacking == callback:
            self.lacking, self.hit = None, self.begun
            raise MemoryError

    def on_message_begin(self):
        self.begun += 1
        self._allocate("on_message_begin")
        super().on_message_begin()

    def on_url(self, url):
        self._allocate("on_url")
        super().on_url(url)

    def on_header(self, name, value):
        self._allocate("on_header")
        super().on_header(name, value)

    def on_headers_complete(self):
        self._allocate("on_headers_complete")
        super().on_headers_complete()
        self._allocate("headers_completed")

    def on_body(self, body):
        self._allocate("on_body")
        super().on_body(body)

    def on_message_complete(self):
        self._allocate("on_message_complete")
        super().on_message_complete()


class Bench:
    """A listening socket, and the event loop that serves it while the test calls `turn`.

    `waiting` has a future for each request whose body has arrived; the route answers when the future gets a result.
    `tasks` has the tasks that handle requests. `released` has the memory of finished requests.
    """

    def __init__(self, tls=None):
        settings = Settings(device="cpu", body_timeout=HOUR, header_timeout=HOUR, keep_alive=HOUR)
        self.waiting, self.released, self.protocols = [], [], []
        engine = SimpleNamespace(submit=self._submit)
        metrics = Metrics()
        route = Route(SimpleNamespace(settings=settings, engine=engine), self._handle)
        self.loop = uvloop.new_event_loop()
        config = Config(Envelope(route, ["/attention"], [metrics.ended]), lifespan="off", ws="none", log_config=None)
        config.header_timeout = config.answer_timeout = config.timeout_keep_alive = HOUR
        config.refuse, config.half_closed = partial(refuse_outside, metrics.ended), HalfClosed()
        config.load()
        state = ServerState()
        self.tasks = state.tasks

        def protocol():
            self.protocols.append(ShortOfMemory(config, state, {}, self.loop))
            return self.protocols[-1]

        serving = self.loop.create_server(protocol, "127.0.0.1", 0, ssl=tls)
        self._server = self.loop.run_until_complete(serving)
        self.port = self._server.sockets[0].getsockname()[1]

    def turn(self, times=TURNS):
        self.loop.run_until_complete(self._turn(times))

    async def _turn(self, times):
        for _ in range(times):
            await asyncio.sleep(0)

    def connect(self):
        """Return a client's non-blocking socket with a small receive buffer, and the server's protocol object."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.connect(("127.0.0.1", self.port))
        connection.setblocking(False)
        self.turn()
        return connection, self.protocols.pop()

    def close(self):
        self._server.close()
        self.turn()
        self.loop.close()

    # The route that answers requests, and its stand-in for the engine

    def _submit(self, job):
        answer = self.loop.create_future()
        self.waiting.append(answer)
        return answer

    def answer(self):
        """Let the route answer the request that has waited longest. Return whether any request waited."""
        self.waiting = [one for one in self.waiting if not one.done()]
        if self.waiting:
            self.waiting[0].set_result(None)
        return bool(self.waiting)

    async def _handle(self, service, request):
        plan = request.headers["x-plan"]
        self._refuse(plan, "early")
        request.body.deadline = deadline_of(request.headers, service.settings)
        message = await SAFETENSORS.read(request, service.settings, Codecs(), None)
        self._refuse(plan, "staging")
        if plan == "memory":
            raise MemoryError
        if plan == "fails":
            raise RuntimeError("a bug")
        memory = {name: bytearray(info.nbytes) for name, info in message.inputs}
        try:
            await message.receive(request, {name: memoryview(place) for name, place in memory.items()})
            self._refuse(plan, "late")
            await submit(service, request, SimpleNamespace(ask=lambda *_: None, remaining=lambda: None), None, None)
            parts = [memoryview(place) for place in memory.values() if place]
            await reply(service, request, parts, {"content-type": wire.MEDIA_TYPE})
        finally:
            for place in memory.values():
                place[:] = bytes([RELEASED]) * len(place)
            self.released += memory.values()

    def _refuse(self, plan, when):
        if plan == when:
            raise Refusal(REFUSALS[when], "as planned")


def body_of(tensor):
    """Return a safetensors message with one int8 tensor, q, of the bytes `tensor`."""
    return wire.build_head([("q", "int8", (len(tensor),))], {}) + tensor


def answers(received):
    """Return (status, fields, body) of each complete answer but those with a status 1xx, and the remaining bytes."""
    results = []
    while b"\r\n\r\n" in received:
        head, _, rest = received.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        status = int(line.split()[1])
        fields = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        if status < 200:
            received = rest
            continue
        if len(rest) < (length := int(fields["content-length"])):
            break
        results.append((status, fields, rest[:length]))
        received = rest[length:]
    return results, received


def code_of(body):
    """Return the `code` of the service's problem document, or the text of a body that is not JSON."""
    try:
        return json.loads(body)["code"]
    except ValueError:
        return body.decode()
