"""In the queue over gRPC, a caller that leaves or is late does not disturb the others, and a call without a key or to a
full queue is refused before its message is read. Triton's kernels are interpreted, and launches wait at gates
(tests/support/faulty/engine.py)."""

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import grpc
import pytest
import torch

from flashpoint_server.access.admission import FEW
from tests.support.oip.grpc_calls import HANG, refused
from tests.support.oip.held import ALL, LOOKS, HeldServer
from tests.support.oip.message import call as http
from tests.support.oip.message import entry, infer, raw
from tests.support.oip.problem import near, problem, truth
from tests.support.servers import wait_for

LIMIT = 8  # requests that `held` admits
METHOD = "/inference.GRPCInferenceService/ModelInfer"
HEALTH = "grpc.health.v1.Health"
KEY = dict(ALL)


def batch_size(call):
    return dict(call.trailing_metadata())["x-batch-size"]


@pytest.mark.slow
def test_a_cancelled_call_and_a_late_one_are_not_in_the_batch_and_the_others_are(held):
    expected = held.queue("alone").result(HANG)
    held.wait_inside(0)
    before = held.metrics()
    with held.busy() as first:
        # With the gated call and the late one these are FEW, which admission accepts at any measured pace.
        mates = [held.queue("stays") for _ in range(FEW - 2)]
        leaver = held.queue("leaves")
        leaver.cancel()
        held.wait_dropped(leaver.name)
        held.wait_inside(FEW - 1)
        late = held.overdue()
    assert first.result(HANG)
    assert [mate.result(HANG) for mate in mates] == [expected] * len(mates)
    assert {batch_size(mate) for mate in mates} == {str(len(mates))}
    assert not held.begun(leaver.name)
    assert not held.begun(late.name)
    after = held.metrics()

    def grown(name):
        return after[name] - before.get(name, 0)

    answered = 1 + len(mates)
    overdue = grown("flashpoint_accepted_total") - answered - 1
    assert overdue >= 1
    assert grown('flashpoint_ended_total{how="answered"}') == answered
    assert grown('flashpoint_ended_total{how="cancelled"}') == 1
    assert grown('flashpoint_ended_total{how="refused"}') == overdue
    assert grown(f'flashpoint_requests_total{{reason="client_gone",route="{METHOD}",status="499"}}') == 1
    assert grown(f'flashpoint_requests_total{{reason="deadline_exceeded",route="{METHOD}",status="504"}}') >= overdue
    assert grown('flashpoint_model_requests_total{how="fail",model="attention"}') >= 1 + overdue


def test_a_call_that_is_cancelled_in_a_running_batch_does_not_change_the_others(held):
    expected = held.queue("alone").result(HANG)
    with contextlib.ExitStack() as first:
        first.enter_context(held.busy())
        with held.busy("wait") as shared:
            mates = [held.queue("stays") for _ in range(2)]
            leaver = held.queue("leaves")
            first.close()
            held.wait_begun(leaver.name)
            leaver.cancel()
            held.wait_inside(3)
    calls = (shared, *mates)
    assert [call.result(HANG) for call in calls] == [expected] * 3
    assert {batch_size(call) for call in calls} == {"4"}


def test_a_full_queue_refuses_a_call_before_its_message_is_read_and_answers_health_checks(held):
    with held.busy():
        queued = [held.queue("waits") for _ in range(LIMIT - 1)]
        with unsent_message(held, ALL) as call:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(call.trailing_metadata())["retry-after"] == "1"
        assert held.caller.ask("Check", HEALTH).status == 1  # SERVING
    assert len({call.result(HANG) for call in queued}) == 1


@pytest.mark.slow
def test_a_call_without_a_key_or_its_right_is_refused_before_its_message_is_read(held):
    for metadata, status, words in (((), "UNAUTHENTICATED", "no valid API key"), (LOOKS, "PERMISSION_DENIED", "key")):
        with unsent_message(held, metadata) as call:
            assert call.code() is grpc.StatusCode[status]
            assert words in call.details()
    with refused("UNAUTHENTICATED"):
        held.caller.ask("ServerMetadata")
    assert held.caller.method("ServerMetadata")(b"", metadata=LOOKS, timeout=HANG)
    with refused("PERMISSION_DENIED"):
        held.caller.method("ModelStatistics")(b"", metadata=LOOKS, timeout=HANG)


@contextlib.contextmanager
def silent_call(caller, metadata=(), method=METHOD):
    """Start a call without a deadline that sends no message until the end."""
    never = threading.Event()

    def messages():
        never.wait(HANG)
        yield from ()

    try:
        yield caller.channel.stream_unary(method).future(messages(), metadata=metadata)
    finally:
        never.set()


@contextlib.contextmanager
def unsent_message(held, metadata):
    """Start a silent call, and return it after the server has ended it."""
    with silent_call(held.caller, metadata) as call:
        assert call.exception(HANG) is not None
        yield call


@pytest.fixture
def private_server(tmp_path):
    """Return a factory of servers for one test, which may stop them or kill their engine."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            private_server = HeldServer(tmp_path, **settings)
            stack.callback(private_server.stop)
            return private_server

        yield start


@pytest.mark.slow
def test_silent_calls_make_way(private_server):
    """A silent call loses its place to a later one, and a stopping server answers all admitted calls."""
    private_server = private_server(queue_limit=2, body_timeout=0.5)

    def answered():
        """Return False while the server has both silent calls and neither counts as slow."""
        try:
            return bool(private_server.caller.infer(private_server.question).bits)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False

    with silent_call(private_server.caller, method=f"/{HEALTH}/Check") as probe:  # it needs no key
        assert probe.exception(HANG).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    with silent_call(private_server.caller) as first, silent_call(private_server.caller) as second:
        calls = (first, second)
        wait_for(lambda: answered() and any(call.done() for call in calls), lambda: "the silent calls stay")
        (gone,) = (call for call in calls if call.done())
        assert gone.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "too slowly" in gone.details()

    def drains():
        """Return False while the server is ready, or after it took this call's message for a slow one."""
        try:
            return not private_server.caller.ask("ServerReady").ready
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return False

    with private_server.busy() as inside:
        private_server.server.process.send_signal(signal.SIGTERM)
        wait_for(drains, lambda: "it never drains")
        with refused("UNAVAILABLE", "shutting down"):
            private_server.caller.infer(private_server.question)
    assert inside.result(HANG)
    assert private_server.server.wait_exit() == 0


@contextlib.contextmanager
def running(held):
    """Run a request in shared memory of the client until the block ends.

    Yields the memory, its key, the name of its region, the future of the answer, and the expected output.
    """
    tensors = problem()
    nbytes = len(raw(tensors["q"]))
    with held.shut() as name, ThreadPoolExecutor(1) as pool:
        key = f"flashpoint-test-{name}"
        block = shared_memory.SharedMemory(key, create=True, size=4 * nbytes)
        try:
            block.buf[: 3 * nbytes] = b"".join(raw(t) for t in tensors.values())
            region = json.dumps({"key": f"/{key}", "offset": 0, "byte_size": 4 * nbytes}).encode()
            path = f"/v2/systemsharedmemory/region/{name}"
            assert http(held.server.url, "POST", f"{path}/register", region, **KEY).status == 200
            places = [
                {"shared_memory_region": name, "shared_memory_byte_size": nbytes, "shared_memory_offset": i * nbytes}
                for i in range(4)
            ]
            document = {
                "inputs": [
                    {**entry(n, t), "parameters": p} for (n, t), p in zip(tensors.items(), places, strict=False)
                ],
                "outputs": [{"name": "o", "parameters": places[3]}],
                "parameters": {"backend": "reference"},
            }
            future = pool.submit(
                http, held.server.url, "POST", "/v2/models/attention/infer", json.dumps(document).encode(),
                **KEY, x_request_id=name,
            )  # fmt: skip
            held.wait_begun(name)
            yield block, key, path, future, truth(tensors)["o"]
        finally:
            held.gate("gate").touch()
            future.result()
            http(held.server.url, "POST", "/v2/systemsharedmemory/unregister", b"", **KEY)
            block.close()
            block.unlink()


def test_a_request_that_runs_keeps_its_region(held):
    """The region is unregistered during the run: the answer is still written, and then the engine unmaps it."""
    with running(held) as (block, key, path, future, expected):
        assert http(held.server.url, "POST", f"{path}/unregister", b"", **KEY).status == 200
        assert not future.done()
        held.gate("gate").touch()
        assert future.result().status == 200
        actual = torch.frombuffer(bytearray(block.buf[len(block.buf) // 4 * 3 :]), dtype=torch.float32)
        near(actual[: expected.numel()].view(expected.shape), expected, 2e-6)
        maps = Path(f"/proc/{held.server.engine_pid}/maps")
        wait_for(lambda: key not in maps.read_text(), lambda: "still mapped")


@pytest.mark.slow
def test_a_client_that_truncates_its_region_costs_an_engine_and_no_more(held):
    """The server has a new engine at the end, and is otherwise unchanged."""
    before = held.server.engine_pid
    with running(held) as (_, key, _, future, _):
        os.truncate(f"/dev/shm/{key}", 0)
        held.gate("gate").touch()
        assert future.result().status == 503
    held.server.wait_ready()
    assert held.server.engine_pid != before
    assert infer(held.server.url, "attention", problem(), headers=KEY).status == 200


@pytest.mark.slow
def test_an_engine_that_dies_is_unavailable_until_the_next_is_there(private_server):
    private_server = private_server()

    def ready():
        return private_server.caller.ask("ServerReady").ready

    with private_server.busy() as first:
        private_server.gate("closed").touch()  # the next engine waits at its start
        os.kill(private_server.server.engine_pid, signal.SIGKILL)
        assert first.code() is grpc.StatusCode.UNAVAILABLE
        assert "engine died" in first.details()
        assert not ready()
        assert not private_server.caller.ask("ModelReady", name="attention").ready
        assert private_server.caller.ask("Check", HEALTH).status == 2  # NOT_SERVING
        with refused("UNAVAILABLE"):
            private_server.caller.infer(private_server.question)
    private_server.gate("closed").unlink()
    wait_for(ready, lambda: "never ready again")
    assert private_server.queue("after").result(HANG)
