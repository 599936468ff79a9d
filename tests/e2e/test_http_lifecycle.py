"""Deadlines, memory, and a server's start and stop work in a real process with real requests.

test_batching.py has full queues, and deadlines and clients that leave while an engine computes.
"""

import concurrent.futures
import http.client
import json
import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from tests.support.gated import GatedServer
from tests.support.messages import JSON, SAFETENSORS, ask, message, normal, post, problem, refused_by_protocol
from tests.support.sockets import connect, nothing_inside

SMALL = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}
GOOD = message(SMALL)
ALONE = message(SMALL, backend="reference")  # this backend runs one request at a time


@pytest.fixture
def background():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


def test_a_body_that_nobody_reads_leaves_its_connection_usable(server):
    """The server answers 404 before the body arrives, discards the body, and answers the next request."""
    with connect(server) as connection:
        connection.sendall(
            b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n" + bytes(1000)
        )
        first = http.client.HTTPResponse(connection)
        first.begin()
        assert (first.status, len(first.read()) > 0) == (404, True)
        connection.sendall(bytes(3_999_000) + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        second = http.client.HTTPResponse(connection)
        second.begin()
        assert second.status == 200


@pytest.mark.slow
def test_an_idle_connection_is_closed_after_the_last_of_its_requests(start_server):
    server = start_server(keep_alive=1)
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, len(answer.read()) > 0) == (200, True)
        assert connection.recv(1) == b""


def test_a_deadline_that_passes_while_the_body_comes_is_504(server):
    with connect(server) as connection:
        connection.sendall(
            f"POST /attention HTTP/1.1\r\nHost: localhost\r\nX-Timeout-Ms: 50\r\nContent-Type: {SAFETENSORS}\r\n"
            f"Content-Length: {len(GOOD)}\r\n\r\n".encode()
            + GOOD[:-8]
        )
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 504


def test_a_deadline_that_passes_while_the_answer_is_written_as_json_is_504(server):
    """The process that writes JSON is stopped until the answer has arrived."""
    assert post(server, "/attention", GOOD, accept=JSON).status == 200  # starts this process
    (codec,) = server.children("formats.codec_process")
    os.kill(codec, signal.SIGSTOP)
    try:
        problem(post(server, "/attention", GOOD, accept=JSON, x_timeout_ms=200), 504, "deadline_exceeded")
    finally:
        os.kill(codec, signal.SIGCONT)
    assert post(server, "/attention", GOOD, accept=JSON).status == 200


def test_out_of_memory_is_503_for_the_culprit_alone(server):
    engine = server.engine_pid
    room = psutil.Process(engine).memory_info().vms + (64 << 20)
    before = resource.prlimit(engine, resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    big = {name: torch.zeros(1, 8, 4096, 8) for name in ("q", "k", "v", "do")}  # 215 MiB of scores in float64
    try:
        answer = post(server, "/attention/grad", message(big, backend="reference"))
    finally:
        resource.prlimit(engine, resource.RLIMIT_AS, before)
    problem(answer, 503, "out_of_memory")
    assert int(answer.headers["retry-after"]) >= 1
    assert post(server, "/attention", GOOD).status == 200
    assert server.get("/health/ready")[0] == 200


def test_a_server_lives_before_it_is_ready_and_may_be_stopped_then(start_server, tmp_path):
    starting = GatedServer(start_server, tmp_path, closed=True).server  # its engine waits before it opens the device
    assert starting.get("/health/live") == (200, {"status": "ok"})
    status, overview = starting.get("/health")
    assert (status, overview["live"], overview["ready"]) == (200, True, False)
    assert "engine" in overview["reason"]
    status, document = starting.get("/health/ready")
    assert (status, document["code"]) == (503, "not_ready")
    refused_by_protocol(starting)
    answer = post(starting, "/attention", GOOD)
    problem(answer, 503, "not_ready")
    assert answer.headers["retry-after"]
    assert starting.get("/info")[1]["device"] is None
    starting.stop()


@pytest.mark.slow
def test_work_beyond_the_shutdown_timeout_is_refused_and_left(start_server, background, tmp_path):
    gated = GatedServer(start_server, tmp_path, shutdown_timeout=0.1)
    server = gated.server
    with gated.busy(background, ALONE) as running:
        queued = gated.post(background, "queued", ALONE)
        server.process.send_signal(signal.SIGTERM)
        problem(running.result(), 503, "draining")
        problem(queued.result(), 503, "draining")
        assert server.wait_exit() == 0
    assert [line["requests"] for line in server.lines if line["event"] == "abandoned"] == [2]


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(start_server, background, tmp_path):
    gated = GatedServer(start_server, tmp_path, shutdown_timeout=3600)
    server = gated.server
    with gated.busy(background, ALONE) as running:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line(lambda line: line["event"] == "draining")
        server.process.send_signal(signal.SIGINT)
        problem(running.result(), 503, "draining")
        assert server.wait_exit() == 1


@pytest.mark.slow
def test_a_bug_of_ours_is_500_with_its_id_in_the_log(gated):
    """The application has a route that fails (tests/support/faulty/server.py)."""
    server = gated.server
    answer = ask(server, "/fail")
    document = problem(answer, 500, "internal_error")
    assert b"unexpected error" not in answer.body
    line = server.wait_for_line(lambda line: line["event"] == "failed" and line["request_id"] == document["request_id"])
    assert "an unexpected error" in line["exception"]
    answer = ask(server, "/typed?number=one")  # the framework refuses this one
    document = problem(answer, 422, "invalid_request")
    assert document["errors"][0]["loc"] == ["number"]
    assert server.get("/health/live")[0] == 200


def test_one_log_line_a_request(server):
    logged, refused = (f"{name}-{os.urandom(4).hex()}" for name in ("logged", "refused"))
    post(server, "/attention", GOOD, x_request_id=logged)
    line = server.wait_for_request(logged)
    assert (line["event"], line["route"], line["status"], line["backend"]) == ("request", "/attention", 200, "torch")
    assert line["shapes"] == {"q": [2, 3], "k": [2, 3], "v": [2, 3]}
    assert line["bytes_in"] == len(GOOD)
    assert line["bytes_out"] > 24
    assert all(line[f"{part}_ms"] >= 0 for part in ("decode", "queue", "compute", "encode"))
    post(server, "/attention", b"", x_request_id=refused)
    line = server.wait_for_request(refused)
    assert (line["status"], line["code"]) == (400, "malformed_body")
    assert sum(line.get("request_id") == logged for line in server.lines) == 1


@pytest.mark.slow
def test_a_wrong_start_ends_with_a_reason_for_a_person():
    ended = start("--port", "70000")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--port: " in ended.stderr


def test_a_variable_that_is_nearly_a_setting_is_warned_of(server):
    """The server prints the warning and then ends, because its port is taken."""
    variables = {
        "FLASHPOINT_QEUE_LIMIT": "1",
        "FLASHPOINT_API_KEY": "a-client-s",
        "FLASHPOINT_PORT_8000_TCP": "tcp://x",
    }
    ended = start("--port", str(server.port), **variables)
    assert (ended.returncode, ended.stdout) == (1, "")
    *warned, last = map(json.loads, ended.stderr.splitlines())
    warnings = [(line["variable"], line["perhaps"]) for line in warned if line["event"] == "unknown setting"]
    assert warnings == [("FLASHPOINT_QEUE_LIMIT", "FLASHPOINT_QUEUE_LIMIT")]
    assert last["event"] == "cannot listen"


@pytest.mark.slow
def test_a_server_whose_device_is_not_there_ends_with_a_reason():
    ended = start("--log-format", "console", "--port", "0", "--device", "cuda:9")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "listening" in ended.stderr
    assert "no CUDA device" in ended.stderr


def start(*flags, **variables):
    """Run `flashpoint serve` with these flags, which ends by itself."""
    command = [sys.executable, "-m", "flashpoint_server.cli.serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def test_info_says_what_it_is(server):
    status, info = server.get("/info")
    assert status == 200
    assert info["backends"] == ["torch", "tiled", "reference"]
    assert info["device"]["name"] == "cpu"
    assert info["versions"]["torch"] == torch.__version__
    assert "softcap" in info["options"]["torch"]  # from the kernels in C
    assert "wide_head_dim" in set(info["options"]["tiled"]) - set(info["options"]["torch"])
    assert info["limits"]["body_bytes"] == 1 << 30
    nothing_inside(server)  # by `load`
