"""The gRPC server: a port shared by workers, logs and metrics, gRPC statuses, draining, and the death of an engine."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import grpc
import grpc.aio

from flashpoint_server.oip.grpc.server import STATUSES, _end
from flashpoint_server.refusal import STATUS
from tests.support.messages import read_metrics
from tests.support.oip.grpc_calls import HANG, HEALTH, METHOD, Caller, port_of, refused, request, silent_call
from tests.support.oip.grpc_calls import request as rpc_request
from tests.support.oip.message import call, infer
from tests.support.oip.problem import problem
from tests.support.servers import wait_for

SMALL = problem()


@pytest.mark.slow
def test_workers_share_the_grpc_port_and_their_statistics(start_server):
    server = start_server(workers=2, grpc_port=0)

    def ports():
        return [line["port"] for line in list(server.lines) if line["event"] == "listening for gRPC"]

    def count():
        (stats,) = call(server.url, "GET", "/v2/models/attention/stats").head["model_stats"]
        return stats["inference_stats"]["success"]["count"]

    wait_for(lambda: len(ports()) == 2, ports)
    (port,) = set(ports())
    for _ in range(8):  # either worker may take a connection
        with contextlib.closing(Caller(port)) as caller:
            wait_for(lambda caller=caller: caller.ask("ServerReady").ready, lambda: "not ready")
            assert caller.infer(rpc_request(SMALL)).bits
    for _ in range(12):
        assert infer(server.url, "attention", SMALL).status == 200
    wait_for(lambda: count() == 20, count)  # a worker may count a request after it has sent the answer
    assert {count() for _ in range(8)} == {20}
    metrics = call(server.url, "GET", "/metrics").body.decode()
    assert 'flashpoint_model_requests_total{how="success",model="attention"} 20.0' in metrics


def test_a_call_has_its_line_in_the_log_and_its_place_in_the_metrics(server, caller):
    before = read_metrics(server)
    metadata = (("x-request-id", "told"), ("x-priority", "9"))
    answer = caller.infer(request(SMALL), metadata=metadata)
    line = server.wait_for_request("told")
    assert (line["route"], line["status"], line["model"]) == (METHOD, 200, "attention")
    assert line["bytes_in"] == request(SMALL).ByteSize()
    assert line["bytes_out"] == answer.message.ByteSize()
    assert answer.beside["x-request-id"] == "told"
    with refused("INVALID_ARGUMENT", "X-Priority"):
        caller.infer(request(SMALL), metadata=(("x-priority", "10"),))
    after = read_metrics(server)
    for name, labels in (
        ("flashpoint_requests_total", f'reason="ok",route="{METHOD}",status="200"'),
        ("flashpoint_requests_total", f'reason="invalid_request",route="{METHOD}",status="422"'),
        ("flashpoint_model_requests_total", 'how="success",model="attention"'),
    ):
        name = f"{name}{{{labels}}}"
        assert after[name] - before.get(name, 0) == 1, name


def test_a_refusal_of_a_call_that_is_over_is_a_cancellation_and_no_error():
    """If `abort` raises InternalError, because the client has left, the method raises CancelledError.

    gRPC would log any other exception of a method as an error.
    """

    class Gone:
        async def abort(self, code, details, metadata):
            raise grpc.aio.InternalError(details)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(_end(Gone(), "INVALID_ARGUMENT", "no such message"))


@pytest.mark.slow
def test_calls_whose_deadlines_pass_during_the_refusal_are_no_errors_in_the_log(server, caller):
    """Each call ends by its deadline or by the refusal of its message, and the log has no error in either case."""
    method, before = caller.channel.unary_unary(METHOD), len(server.lines)
    for _ in range(20):
        calls = [method.future(b"\xff", timeout=0.002 + 0.0005 * step) for step in range(50)]
        assert {call.exception(HANG).code() for call in calls} <= {
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.INVALID_ARGUMENT,
        }
    answer = caller.infer(request(SMALL))
    server.wait_for_request(answer.beside["x-request-id"])
    assert not [line for line in server.lines[before:] if line["level"] == "error"]


def test_every_refusal_has_its_status():
    assert STATUSES.keys() >= STATUS.keys()
    assert all(grpc.StatusCode[name] for name in STATUSES.values())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_grpc_port_that_is_taken_ends_the_server(server, workers):
    command = [sys.executable, "-m", "flashpoint_server.cli.serve", "--port=0", f"--grpc-port={port_of(server)}"]
    done = subprocess.run([*command, f"--workers={workers}"], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert f"port {port_of(server)} is in use by another program" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_silent_calls_make_way(private_server):
    """A call that sends no message is ended if a later call needs its place in the queue.

    A stopping server refuses new inference calls, but still answers `ServerReady` and the running call.
    """
    private_server = private_server(queue_limit=2, body_timeout=0.5)

    def answered():
        """Return whether a call is answered. It is refused as long as neither silent call counts as too slow."""
        try:
            return bool(private_server.caller.infer(private_server.question).bits)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False

    with silent_call(private_server.caller, method=f"/{HEALTH}/Check") as probe:  # ends after body_timeout
        assert probe.exception(HANG).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    with silent_call(private_server.caller) as first, silent_call(private_server.caller) as second:
        calls = (first, second)
        wait_for(lambda: answered() and any(call.done() for call in calls), lambda: "the silent calls stay")
        (gone,) = (call for call in calls if call.done())
        assert gone.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "too slowly" in gone.details()

    def drains():
        """Return whether the server reports that it is not ready; False if it ended this call as too slow."""
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


@pytest.mark.slow
def test_an_engine_that_dies_is_unavailable_until_the_next_is_there(private_server):
    private_server = private_server()

    def ready():
        return private_server.caller.ask("ServerReady").ready

    with private_server.busy() as first:
        private_server.gate("closed").touch()  # makes the next engine wait at its start
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


@pytest.mark.parametrize(("interval", "allowed"), [(0.001, True), (60, False)])
def test_pings_of_a_client_end_its_connection_only_below_the_interval(start_server, interval, allowed):
    port = port_of(start_server(ready=False, grpc_port=0, grpc_ping_interval=interval))
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as client, client.makefile("rb") as received:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        for n in range(6):
            with contextlib.suppress(ConnectionError):
                client.sendall(frame(PING, n.to_bytes(8, "big")))
            kind, payload = next_of(received, PING, GOAWAY)
            if kind == GOAWAY:
                break
            assert payload == n.to_bytes(8, "big")
            time.sleep(0.01)  # ten times the shorter interval
    assert (kind == PING) == allowed, payload
    assert allowed or payload.endswith(b"too_many_pings")


SETTINGS, PING, GOAWAY = 4, 6, 7  # types of HTTP/2 frames (RFC 9113, section 6)


def frame(kind, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


def next_of(received, *kinds):
    """Return the type and the payload of the next frame of one of these types."""
    while True:
        head = received.read(9)
        kind, payload = head[3], received.read(int.from_bytes(head[:3], "big"))
        if kind in kinds:
            return kind, payload
