"""What callers over gRPC do reaches the queue: who leaves it or is late costs the others nothing, and no message is
read of who may not ask, or comes when there is no room. Triton's kernels run under its interpreter, and wait where they
are told to (tests/support/faulty/engine.py)."""

import contextlib
import json
import os
import re
import secrets
import signal
import threading
import urllib.request

import grpc
import pytest

from tests.support.oip.grpc_calls import Caller, port_of, refused, request
from tests.support.oip.problem import problem
from tests.support.servers import serve, wait_for

LIMIT = 8
ALL, LOOKS = ((("authorization", f"Bearer {key}"),) for key in ("all", "looks"))
ASKED = request({name: t[:, :, :5] for name, t in problem().items()}, backend="triton")
METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Held:
    """A server whose launches can be held up."""

    def __init__(self, gates):
        self.gates = gates / "open"
        self.server = serve(
            program=("-m", "tests.support.faulty.server"),
            interpret=True,
            log_level="debug",
            environment={"FLASHPOINT_TEST_GATE": str(self.gates)},
            grpc_port=0,
            queue_limit=LIMIT,
            api_keys="all,looks:info",
        )
        self.caller = Caller(port_of(self.server))

    def begin(self, name, **how):
        return self.caller.begin(ASKED, metadata=(*ALL, ("x-request-id", name)), **how)

    @contextlib.contextmanager
    def busy(self, kind="gate"):
        """Inside, a request named so is in a launch that waits, once it is reached: its call."""
        gate = self.gates.with_suffix(f".{kind}")
        gate.unlink(missing_ok=True)
        name = f"{kind}-{secrets.token_hex(4)}"
        try:
            call = self.begin(name)
            call.begun = lambda: self.server.wait_for_line(
                lambda line: line["event"] == "begin" and line["request_id"] == name
            )
            yield call
        finally:
            gate.touch()
        call.result()

    def asked(self, path):
        asking = urllib.request.Request(f"{self.server.url}{path}", headers=dict(ALL))
        with urllib.request.urlopen(asking, timeout=30) as answer:
            return answer.read().decode()

    def wait_inside(self, count):
        """Until so many requests are inside."""
        wait_for(lambda: json.loads(self.asked("/info"))["load"]["requests"] == count, lambda: f"never {count} inside")

    def metrics(self):
        return {n: float(v) for n, v in re.findall(r"^([^#\s]+) (\S+)$", self.asked("/metrics"), re.MULTILINE)}


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    held = Held(tmp_path_factory.mktemp("gates"))
    yield held
    held.caller.close()
    held.server.stop()


def batch_size(call):
    return dict(call.trailing_metadata())["x-batch-size"]


def test_who_cancels_or_is_late_is_not_in_the_batch_and_its_mates_are(held):
    expected = held.begin("alone").result()
    before = held.metrics()
    with held.busy() as first:
        first.begun()
        mates = [held.begin(f"stays-{n}") for n in range(3)]
        held.wait_inside(4)
        leaver = held.begin("leaves")
        held.wait_inside(5)
        leaver.cancel()
        held.wait_inside(4)
        late = held.begin("late", timeout=2)  # how it ends is counted below: it was inside
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        held.wait_inside(4)
    assert [mate.result() for mate in mates] == [expected] * 3
    assert {batch_size(mate) for mate in mates} == {"3"}
    after = held.metrics()
    for name, grown in {
        'flashpoint_ended_total{how="cancelled"}': 1,
        'flashpoint_ended_total{how="refused"}': 1,
        'flashpoint_ended_total{how="answered"}': 4,
        f'flashpoint_requests_total{{reason="client_gone",route="{METHOD}",status="0"}}': 1,
        f'flashpoint_requests_total{{reason="deadline_exceeded",route="{METHOD}",status="504"}}': 1,
        'flashpoint_model_requests_total{how="fail",model="attention"}': 2,
    }.items():
        assert after[name] - before.get(name, 0) == grown, name


def test_who_leaves_a_running_batch_costs_its_mates_nothing(held):
    expected = held.begin("alone").result()
    with contextlib.ExitStack() as later:
        with held.busy() as first:
            first.begun()
            second = later.enter_context(held.busy("wait"))
            mates = [held.begin(f"stays-{n}") for n in range(2)]
            leaver = held.begin("leaves")
            held.wait_inside(5)
        second.begun()
        leaver.cancel()
        held.wait_inside(3)
    assert [mate.result() for mate in mates] == [expected] * 2
    assert {batch_size(mate) for mate in mates} == {"4"}


def test_a_full_queue_refuses_before_the_message_is_read_and_probes_get_through(held):
    with held.busy() as first:
        first.begun()
        queued = [held.begin(f"waits-{n}") for n in range(LIMIT - 1)]
        held.wait_inside(LIMIT)
        with unsent_message(held, ALL) as call:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(call.trailing_metadata())["retry-after"] == "1"
        assert held.caller.ask("Check", "grpc.health.v1.Health").status == 1  # SERVING
    assert len({call.result() for call in queued}) == 1


def test_who_may_not_ask_is_refused_before_the_message_is_read(held):
    for metadata, status, words in (((), "UNAUTHENTICATED", "key is needed"), (LOOKS, "PERMISSION_DENIED", "key")):
        with unsent_message(held, metadata) as call:
            assert call.code() is grpc.StatusCode[status]
            assert words in call.details()
    with refused("UNAUTHENTICATED"):
        held.caller.ask("ServerMetadata")
    assert held.caller.method("ServerMetadata")(b"", metadata=LOOKS, timeout=60)
    with refused("PERMISSION_DENIED"):
        held.caller.method("ModelStatistics")(b"", metadata=LOOKS, timeout=60)


@contextlib.contextmanager
def silent_call(caller, metadata=(), timeout=None, method=METHOD):
    """A call whose message is not sent."""
    never = threading.Event()

    def messages():
        never.wait(60)
        yield from ()

    try:
        yield caller.channel.stream_unary(method).future(messages(), metadata=metadata, timeout=timeout)
    finally:
        never.set()


@contextlib.contextmanager
def unsent_message(held, metadata):
    """A silent call, which is over all the same."""
    with silent_call(held.caller, metadata, 60) as call:
        assert call.exception(60) is not None
        yield call


def test_silent_calls_make_way():
    server = serve(grpc_port=0, queue_limit=2, body_timeout=0.5)
    caller = Caller(port_of(server))

    def answered():
        """Refused as long as both may only be slow."""
        try:
            return caller.infer(request(problem())).bits
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return None

    try:
        assert answered()
        with silent_call(caller, method="/grpc.health.v1.Health/Check") as probe:  # for which nobody needs a key
            assert probe.exception(20).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with silent_call(caller) as first, silent_call(caller) as second:
            wait_for(lambda: not answered(), lambda: "there is room for a third")
            wait_for(answered, lambda: "the silent calls stay")
            (gone,) = [call for call in (first, second) if call.done()]
            assert gone.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "too slowly" in gone.details()
    finally:
        caller.close()
        server.stop()


@pytest.mark.full
def test_an_engine_that_dies_is_unavailable_until_the_next_is_there(held):
    def ready():
        return held.caller.ask("ServerReady").ready

    with contextlib.suppress(grpc.RpcError), held.busy() as first:
        first.begun()
        os.kill(held.server.engine_pid, signal.SIGKILL)
        assert first.code() is grpc.StatusCode.UNAVAILABLE
        assert "engine died" in first.details()
        assert not ready()
        assert not held.caller.ask("ModelReady", name="attention").ready
        assert held.caller.ask("Check", "grpc.health.v1.Health").status == 2  # NOT_SERVING
        with refused("UNAVAILABLE"):
            held.caller.infer(ASKED, metadata=ALL)
    wait_for(ready, lambda: "never ready again")
    assert held.begin("after").result()


def test_a_server_that_stops_answers_what_is_inside_and_refuses_what_comes(held):
    """The last test of this server."""
    with held.busy() as first:
        first.begun()
        held.server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not held.caller.ask("ServerReady").ready, lambda: "it never drains")
        with refused("UNAVAILABLE", "shutting down"):
            held.caller.infer(ASKED, metadata=ALL)
    assert held.server.wait_exit() == 0


@pytest.mark.full
def test_workers_share_the_port_and_one_is_found_for_them():
    server = serve(workers=2, grpc_port=0)
    try:
        found = wait_for(
            lambda: (
                len(lines := [line for line in list(server.lines) if line["event"] == "listening for gRPC"]) == 2
                and {line["port"] for line in lines}
            ),
            lambda: server.lines,
        )
        (port,) = found
        for _ in range(8):  # whichever of them takes the connection
            caller = Caller(port)
            wait_for(lambda caller=caller: caller.ask("ServerReady").ready, lambda: "not ready")
            assert caller.infer(request(problem())).bits
            caller.close()
    finally:
        server.stop()
