"""The server answers valid requests, however they are framed and cut, and whatever happens while they arrive.

Random events are deadlines, refusals, a lack of memory and cancellation. Answers come in order, each fits its request,
and none is 400. The server does not write to released memory.
"""

import contextlib
import gc
import itertools
import socket
import time
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from flashpoint_server.http import body, protocol
from flashpoint_server.http import request as http_request
from flashpoint_server.http.body import NEARLY, RequestBody
from flashpoint_server.refusal import STATUS
from tests.support.connections import CALLBACKS, REFUSALS, RELEASED, Bench, answers, body_of, code_of

PATIENCE = 60  # seconds; a longer wait is a hang
GRACE = 0.001  # seconds; replaces GRACE of the server, so that deadlines pass soon
SIZES = (0, 1, 100, 40_000, 200_000, 1_500_000)
PLANS = ("deadline", "memory", "fails", *REFUSALS)
MAX_REQUESTS = 8  # requests of one connection

request_plans = st.fixed_dictionaries({
    "size": st.sampled_from(SIZES),
    "plan": st.just("answers") | st.sampled_from(PLANS),
    "chunks": st.just(0) | st.sampled_from((5000, 33_000)),
    "expects": st.booleans(),
    "closes": st.integers(0, 9).map(lambda luck: luck == 9),
})  # fmt: skip


class Request:
    """The bytes of one request, and a check of its answer."""

    def __init__(self, number, size, plan, chunks, expects, closes):
        self.number = number
        self.plan, self.chunks, self.closes = plan, chunks, closes
        self.tensor = (b"%08d" % self.number * (size // 8 + 1))[:size]
        sent = body_of(self.tensor)
        fields = {"Host": "localhost", "X-Plan": plan, "X-Request-Id": f"r{self.number}"}
        if plan == "deadline":
            fields["X-Timeout-Ms"] = "1"
        if expects:
            fields["Expect"] = "100-continue"
        if closes:
            fields["Connection"] = "close"
        if chunks:
            fields["Transfer-Encoding"] = "chunked"
            parts = [sent[at : at + chunks] for at in range(0, len(sent), chunks)]
            sent = b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"
        else:
            fields["Content-Length"] = str(len(sent))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.head = f"POST /attention HTTP/1.1\r\n{head}\r\n".encode()
        self.text = self.head + sent
        # The answer may close the connection. Later requests would then get no answers.
        refused = plan in ("early", "staging", "memory") and (chunks or expects or size > NEARLY)
        self.may_close = closes or refused or plan == "deadline"
        self.cancelled = False

    def check(self, status, fields, body, *, short):
        """Assert that this answer to the request is allowed.

        `short`: while the request arrived, the server lacked memory.
        """
        if status == 200:
            assert self.plan in ("answers", "deadline")
            assert body == self.tensor
            assert fields["x-request-id"] == f"r{self.number}"
            return
        codes = {"deadline": "deadline_exceeded", "memory": "out_of_memory", "fails": "internal_error", **REFUSALS}
        allowed = {codes.get(self.plan)} | ({"out_of_memory"} if short else set())
        if self.cancelled:
            allowed |= {"draining", "Internal Server Error"}
        code = code_of(body)
        assert code in allowed, (status, fields, body)
        assert status == STATUS.get(code, 500)
        assert (status in (429, 503)) == ("retry-after" in fields)


class Connection(RuleBasedStateMachine):
    """Random operations of a client on one connection, and of the server: send, read, wait, answer, fail."""

    bench = None

    def __init__(self):
        super().__init__()
        self.socket, self.server = self.bench.connect()
        self.requests, self.outbox, self.received = [], bytearray(), bytearray()
        self.reading, self.ended, self.half_closed = True, False, False

    @initialize(several=st.lists(request_plans, min_size=1, max_size=4))
    def ask_several(self, several):
        for how in several:
            self.ask(how)

    @precondition(lambda self: not self.half_closed and len(self.requests) < MAX_REQUESTS)
    @rule(how=request_plans)
    def ask(self, how):
        """Append a request to the bytes that wait to be sent."""
        if self.requests and self.requests[-1].may_close and (self.requests[-1].closes or not self._answered()):
            return
        self.requests.append(Request(len(self.requests), **how))
        self.outbox += self.requests[-1].text

    @precondition(lambda self: self.outbox)
    @rule(size=st.integers(1, 300) | st.integers(20_000, 70_000) | st.just(1 << 21), turns=st.integers(0, 4))
    def send(self, size, turns):
        self._send(size)
        self.bench.turn(turns)

    @precondition(lambda self: self.outbox)
    @rule(offset=st.integers(-2, 2))
    def send_to_the_end_of_a_request(self, offset):
        """Send up to the end of a request or of its head, or up to two bytes more or less."""
        ends = list(itertools.accumulate(len(part) for r in self.requests for part in (r.head, r.text[len(r.head) :])))
        sent = ends[-1] - len(self.outbox)
        self._send(max(1, next(end for end in ends if end > sent) - sent + offset))

    @rule()
    def let_the_server_run(self):
        self.bench.turn()

    @rule()
    def stop_the_server(self):
        """Block the event loop of the server, so that deadlines pass, and data arrives together afterwards."""
        time.sleep(3 * GRACE)

    @rule()
    def read(self):
        self.reading = True
        self._read()

    @rule()
    def stop_reading(self):
        self.reading = False

    @rule()
    def answer(self):
        self.bench.answer()

    @rule(luck=st.integers(0, 5), callback=st.sampled_from(CALLBACKS))
    def run_out_of_memory(self, luck, callback):
        if not luck:  # only sometimes, because it closes the connection
            self.server.lacking = callback

    @precondition(lambda self: not self.half_closed)
    @rule(luck=st.integers(0, 5))
    def end_sending(self, luck):
        if luck:  # only sometimes, because nothing can be sent afterwards
            return
        self.half_closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def _send(self, size):
        if self.half_closed:
            return
        try:
            sent = self.socket.send(self.outbox[:size])
        except BlockingIOError:
            sent = 0
        except OSError:  # the server has closed the connection
            sent = len(self.outbox)
        del self.outbox[:sent]

    def _read(self):
        """Read the bytes that have arrived, unless the client does not read at present."""
        with contextlib.suppress(BlockingIOError):
            while self.reading and not self.ended:
                try:
                    data = self.socket.recv(1 << 20)
                except ConnectionResetError:
                    data = b""
                self.ended = not data
                self.received += data

    def teardown(self):
        """Send all bytes, read all answers, and compare them with the requests."""
        try:
            self.reading, end = True, time.monotonic() + PATIENCE
            unsent = len(self.outbox) if self.half_closed else 0
            while not self._over(unsent):
                assert time.monotonic() < end, f"{len(self._answers())} answers to {len(self.requests)} requests"
                self._send(1 << 20)
                self.bench.turn()
                self.bench.answer()
                self._read()
            self._compare(unsent)
        finally:
            self.socket.close()
            self.bench.turn()
            for task in list(self.bench.tasks):
                task.cancel()
            self.bench.turn()
            released, self.bench.released[:] = list(self.bench.released), []
        assert all(place.count(RELEASED) == len(place) for place in released)

    def _answered(self):
        return len(self._answers()) == len(self.requests) and not self.ended

    def _answers(self):
        return answers(bytes(self.received))[0]

    def _over(self, unsent):
        if self.ended:
            return True
        return (
            not unsent
            and not self.outbox
            and len(self._answers()) == len(self.requests)
            and (not self.requests or not self.requests[-1].closes)
        )

    def _compare(self, unsent):
        received, rest = answers(bytes(self.received))
        hit = self.server.hit
        assert len(received) <= len(self.requests)
        for number, (request, answer) in enumerate(zip(self.requests, received, strict=False)):
            request.check(*answer, short=hit == number)
            if answer[1].get("connection") == "close":
                assert number == len(received) - 1
                assert request.may_close or request.cancelled or hit == number or self.half_closed
                return
        if len(received) == len(self.requests):
            return
        # The connection ended without an answer to the next request.
        left = len(received) >= self.server.begun if self.half_closed else False
        lost = hit is not None and len(received) > hit  # the server lacked memory for the rest of an earlier body
        assert left or lost or any(r.cancelled for r in self.requests), (len(received), hit, bytes(rest[:200]))


@pytest.fixture(scope="module")
def bench():
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    for module in (body, protocol):
        monkeypatch.setattr(module, "GRACE", GRACE)


def explore(bench, examples):
    machine = type("OnBench", (Connection,), {"bench": bench})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30))


def test_a_connection_answers_every_request_whatever_happens_while_it_arrives(bench):
    explore(bench, 50)


@pytest.mark.slow
def test_more_connections_answer_every_request(bench):
    explore(bench, 300)


def exchanged(bench, connection, text, answered=1):
    """Send the bytes `text`, and return `answered` answers, or fewer if the connection ends."""
    received, end = b"", time.monotonic() + PATIENCE
    connection.sendall(text)
    while len(answers(received)[0]) < answered:
        assert time.monotonic() < end, received
        bench.answer()
        bench.turn()
        with contextlib.suppress(BlockingIOError):
            if not (data := connection.recv(1 << 20)):
                break
            received += data
    return answers(received)[0]


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_request_that_arrives_while_memory_is_short_is_answered_503(bench, callback):
    """A valid request that arrives while the server lacks memory gets 503, which the SDK retries, and not 400."""
    connection, server = bench.connect()
    with connection:
        server.lacking = callback
        ((status, fields, body),) = exchanged(bench, connection, Request(0, 100, "answers", 0, False, False).text)
        assert (status, code_of(body), fields["connection"]) == (503, "out_of_memory", "close")
        assert fields["retry-after"] == "1"


@pytest.mark.parametrize("wrong", [b"NO SUCH THING", b"POST /attention HTTP/1.1\r\nHost: a\r\nHost: b"])
@pytest.mark.parametrize("complete", [True, False])
def test_an_earlier_request_is_answered_before_the_one_that_cannot_be_read(bench, wrong, complete):
    """A request is answered before the 400 for a later one that has a malformed head or body."""
    connection, _ = bench.connect()
    first, second = Request(0, 100, "answers", 0, False, False), Request(1, 100, "answers", 50, False, False)
    text = first.text + (wrong + b"\r\n\r\n" if complete else second.text[: len(second.head) + 20] + b"\r\n" * 40)
    with connection:
        one, other = exchanged(bench, connection, text, answered=2)
    first.check(*one, short=False)
    assert (other[0], code_of(other[2])) == (400, "malformed_head" if complete else "malformed_body")


def test_what_arrives_after_the_deadline_does_not_touch_released_memory(bench):
    """Bytes of a body that arrive after its deadline are not written to its memory, which may have been reused."""
    bench.released.clear()  # forget releases of earlier tests
    connection, _ = bench.connect()
    request = Request(0, 200_000, "deadline", 0, False, False)
    with connection:
        connection.sendall(request.text[:60_000])
        end = time.monotonic() + PATIENCE
        while not bench.released:
            assert time.monotonic() < end
            bench.turn()
        ((status, _, body),) = exchanged(bench, connection, request.text[60_000:])
        assert (status, code_of(body)) == (504, "deadline_exceeded")
        bench.turn()
    assert all(place.count(RELEASED) == len(place) for place in bench.released)
    bench.released.clear()


def test_a_bug_in_reading_a_request_is_500(bench, monkeypatch):
    def fails(*_):
        raise AttributeError("a bug")

    monkeypatch.setattr(protocol, "wrong", fails)
    connection, _ = bench.connect()
    with connection:
        ((status, _, body),) = exchanged(bench, connection, Request(0, 100, "answers", 0, False, False).text)
    assert (status, code_of(body)) == (500, "internal_error")


@pytest.mark.parametrize("plan", ["answers", "late"])
def test_an_ended_request_is_freed_without_the_garbage_collector(bench, plan):
    """A request, its body and its plan are no reference cycle: they are freed when the next request has come."""
    connection, _ = bench.connect()
    gc.collect()
    gc.disable()
    try:
        with connection:
            exchanged(bench, connection, Request(0, 100, plan, 0, False, False).text)
            held = [one for one in gc.get_objects() if type(one) in (http_request.Request, RequestBody)]
            refs = [weakref.ref(one) for one in held]
            assert refs
            del held
            exchanged(bench, connection, Request(1, 100, "answers", 0, False, False).text)
            bench.turn()
            assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
