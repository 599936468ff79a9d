"""Overload, deadlines, memory, and a server's beginning and end, each with real work in a real process."""

import concurrent.futures
import contextlib
import http.client
import resource
import signal
import socket
import subprocess
import sys
import textwrap

import httpx
import psutil
import pytest
import torch

from tests.support.messages import JSON, SAFETENSORS, Reply, message, normal, post, problem
from tests.support.servers import wait_for

SMALL = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}
GOOD = message(SMALL)
QUEUED = message(SMALL, backend="reference")  # of that backend one request runs at a time

# A second or more of work on two cores, in pieces that let other threads run.
LONG_TENSORS = {name: normal(1, 3, 2000, 2, seed=seed) for seed, name in enumerate(["q", "k", "v", "do"])}
LONG = message(LONG_TENSORS, backend="reference")


@pytest.fixture(scope="module")
def pair(start_server):
    """A server that admits two requests at a time: one that runs, and one that waits."""
    return start_server(queue_limit=2, log_level="debug")


@pytest.fixture
def background():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


def begin(server, background, request_id, body=LONG, **headers):
    """Post a long gradient request; returns its future once it is being computed."""
    future = background.submit(post, server, "/attention/grad", body, x_request_id=request_id, **headers)
    server.wait_for_line(lambda line: line["event"] == "begin" and line["request_id"] == request_id)
    return future


def wait_until_admitted(server, requests):
    wait_for(lambda: server.get("/info")[1]["load"]["requests"] == requests, lambda: "they never got in")


def was_begun(server, request_id):
    return any(line["event"] == "begin" and line["request_id"] == request_id for line in server.lines)


def test_a_full_queue_is_429_and_other_answers_come_during_a_long_compute(pair, background):
    long = begin(pair, background, "long")
    queued = background.submit(post, pair, "/attention", QUEUED)
    wait_until_admitted(pair, 2)
    answer = post(pair, "/attention", GOOD)
    problem(answer, 429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    answered = 0
    with httpx.Client(base_url=pair.url) as client:
        while not long.done():
            assert client.get("/health/live").status_code == 200
            answered += 1
    assert answered >= 20  # an event loop that computes would answer one or two
    assert set(long.result().tensors) == {"dq", "dk", "dv"}
    assert queued.result().status == 200
    assert post(pair, "/attention", GOOD).status == 200


def test_a_deadline_that_passes_in_the_queue_or_in_the_compute_is_504(pair, background):
    long = begin(pair, background, "runs-late", x_timeout_ms=400)
    problem(post(pair, "/attention", QUEUED, x_timeout_ms=50, x_request_id="waits-late"), 504, "deadline_exceeded")
    problem(long.result(), 504, "deadline_exceeded")
    # An answer of two million numbers, whose text takes longer than its compute.
    wide = {"q": torch.zeros(16384, 128), "k": torch.zeros(1, 128), "v": torch.zeros(1, 128)}
    problem(post(pair, "/attention", message(wide), accept=JSON, x_timeout_ms=500), 504, "deadline_exceeded")
    assert post(pair, "/attention", GOOD).status == 200
    assert not was_begun(pair, "waits-late")


def refused_by_protocol(server):
    """Whether /v2 takes no work, and says so in its own way."""
    asked = [server.get(path) for path in ("/v2/health/ready", "/v2/models/attention/ready")]
    answer = post(server, "/v2/models/attention/infer", b"{}", None)
    asked.append((answer.status, answer.json))
    return all(status == 503 and list(document) == ["error"] for status, document in asked)


def test_a_client_that_leaves_the_queue_is_not_computed(pair, background):
    long = begin(pair, background, "stays")
    with contextlib.closing(socket.create_connection(("127.0.0.1", pair.port), timeout=30)) as connection:
        connection.sendall(
            f"POST /attention HTTP/1.1\r\nHost: x\r\nX-Request-Id: left\r\nContent-Type: {SAFETENSORS}\r\n"
            f"Content-Length: {len(QUEUED)}\r\n\r\n".encode()
            + QUEUED
        )
        wait_until_admitted(pair, 2)
    line = pair.wait_for_line(lambda line: line["event"] == "request" and line["request_id"] == "left")
    assert (line["status"], line["code"]) == (None, "client_gone")
    assert pair.get("/info")[1]["load"]["requests"] == 1
    assert not long.done()
    assert long.result().status == 200
    assert post(pair, "/attention", GOOD).status == 200
    assert not was_begun(pair, "left")


def test_a_body_that_nobody_reads_leaves_its_connection_usable(server):
    """Answered 404 before its body has come; the rest of it is thrown away, and the next request is answered."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + bytes(1000))
        first = http.client.HTTPResponse(connection)
        first.begin()
        assert (first.status, len(first.read()) > 0) == (404, True)
        connection.sendall(bytes(3_999_000) + b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        second = http.client.HTTPResponse(connection)
        second.begin()
        assert second.status == 200


def test_a_deadline_that_passes_while_the_body_comes_is_504(server):
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(
            f"POST /attention HTTP/1.1\r\nHost: x\r\nX-Timeout-Ms: 50\r\nContent-Type: {SAFETENSORS}\r\n"
            f"Content-Length: {len(GOOD)}\r\n\r\n".encode()
            + GOOD[:-8]
        )
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 504


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


def test_a_server_lives_before_it_is_ready_and_may_be_stopped_then(start_server):
    server = start_server(ready=False)
    assert server.get("/health/live") == (200, {"status": "ok"})
    status, document = server.get("/health/ready")
    assert (status, document["code"]) == (503, "not_ready")
    assert refused_by_protocol(server)
    answer = post(server, "/attention", GOOD)
    problem(answer, 503, "not_ready")
    assert answer.headers["retry-after"]
    assert server.get("/info")[1]["device"] is None
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_0(start_server, background):
    server = start_server(log_level="debug")
    long = begin(server, background, "runs")
    queued = background.submit(post, server, "/attention", QUEUED)
    wait_until_admitted(server, 2)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_line(lambda line: line["event"] == "draining")
    status, document = server.get("/health/ready")
    assert (status, document["code"]) == (503, "draining")
    assert refused_by_protocol(server)
    assert server.get("/health/live")[0] == 200
    answer = post(server, "/attention", GOOD)
    problem(answer, 503, "draining")
    assert answer.headers["retry-after"]
    assert not long.done()
    assert set(long.result().tensors) == {"dq", "dk", "dv"}
    assert queued.result().status == 200
    assert server.wait_exit() == 0


def test_work_beyond_the_shutdown_timeout_is_refused_and_left(start_server, background):
    server = start_server(shutdown_timeout=0.1, log_level="debug")
    eight = {name: t.expand(8, -1, -1, -1) for name, t in LONG_TENSORS.items()}
    long = begin(server, background, "too-long", message(eight, backend="reference"))
    queued = background.submit(post, server, "/attention", QUEUED)
    wait_until_admitted(server, 2)
    server.process.send_signal(signal.SIGTERM)
    problem(long.result(), 503, "draining")
    problem(queued.result(), 503, "draining")
    assert server.wait_exit() == 0
    assert [line["requests"] for line in server.lines if line["event"] == "abandoned"] == [2]


def test_a_second_signal_ends_it_at_once(start_server, background):
    server = start_server(log_level="debug")
    eight = {name: t.expand(8, -1, -1, -1) for name, t in LONG_TENSORS.items()}
    long = begin(server, background, "cut-off", message(eight, backend="reference"))
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_line(lambda line: line["event"] == "draining")
    server.process.send_signal(signal.SIGINT)
    problem(long.result(), 503, "draining")
    assert server.wait_exit() == 1


def test_a_bug_of_ours_is_500_with_its_id_in_the_log(start_server, tmp_path):
    """A route that fails, added to the real application in a real process."""
    program = tmp_path / "failing.py"
    program.write_text(
        textwrap.dedent("""
        import sys
        from flashpoint_server import Settings, create_app, logs, serving

        def fail():
            raise KeyError("what nobody foresaw")

        def typed(number: int):
            return number

        settings = Settings(_cli_parse_args=sys.argv[1:])
        logs.configure("json", "info")
        app = create_app(settings)
        app.add_api_route("/fail", fail)
        app.add_api_route("/typed", typed)
        sys.exit(serving.serve_on(serving.listen(settings), app))
        """)
    )
    server = start_server(ready=False, program=(str(program),))
    answer = httpx.get(f"{server.url}/fail")
    document = problem(Reply(answer.status_code, answer.headers, answer.content), 500, "internal_error")
    assert "nobody foresaw" not in answer.text
    line = server.wait_for_line(lambda line: line["event"] == "failed")
    assert line["request_id"] == document["request_id"]
    assert "what nobody foresaw" in line["exception"]
    answer = httpx.get(f"{server.url}/typed?number=one")  # one that the framework refuses
    document = problem(Reply(answer.status_code, answer.headers, answer.content), 422, "invalid_request")
    assert document["errors"][0]["loc"] == ["query.number"]
    assert server.get("/health/live")[0] == 200


def test_one_log_line_a_request(server):
    post(server, "/attention", GOOD, x_request_id="logged")
    line = server.wait_for_line(lambda line: line.get("request_id") == "logged")
    assert (line["event"], line["route"], line["status"], line["backend"]) == ("request", "/attention", 200, "torch")
    assert line["shapes"] == {"q": [2, 3], "k": [2, 3], "v": [2, 3]}
    assert line["bytes_in"] == len(GOOD)
    assert line["bytes_out"] > 24
    assert all(line[f"{part}_ms"] >= 0 for part in ("decode", "queue", "compute", "encode"))
    post(server, "/attention", b"", x_request_id="refused")
    line = server.wait_for_line(lambda line: line.get("request_id") == "refused")
    assert (line["status"], line["code"]) == (400, "malformed_body")
    assert sum(line.get("request_id") == "logged" for line in server.lines) == 1


def test_a_variable_that_is_nearly_a_setting_is_warned_of(start_server):
    variables = {
        "FLASHPOINT_QEUE_LIMIT": "1",
        "FLASHPOINT_API_KEY": "a-client-s",
        "FLASHPOINT_PORT_8000_TCP": "tcp://x",
    }
    server = start_server(environment=variables)
    said = [(line["variable"], line["perhaps"]) for line in server.lines if line["event"] == "unknown setting"]
    assert said == [("FLASHPOINT_QEUE_LIMIT", "FLASHPOINT_QUEUE_LIMIT")]


def test_a_wrong_start_ends_with_a_reason_for_a_person(server):
    command = [sys.executable, "-m", "flashpoint_server.cli"]
    out = subprocess.run([*command, "--port", "70000"], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (2, "")
    assert "--port: " in out.stderr
    command += ["--log-format", "console", "--device", "cuda:9"]
    out = subprocess.run([*command, "--port", str(server.port)], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (1, "")
    assert "cannot listen" in out.stderr
    out = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (1, "")
    assert "listening" in out.stderr
    assert "no CUDA device" in out.stderr


def test_info_says_what_it_is(server):
    status, info = server.get("/info")
    assert status == 200
    assert info["backends"] == ["torch", "tiled", "reference"]
    assert info["device"]["name"] == "cpu"
    assert info["versions"]["torch"] == torch.__version__
    assert "softcap" in info["options"]["tiled"]
    assert "softcap" not in info["options"]["torch"]
    assert info["limits"]["body_bytes"] == 1 << 30
    assert info["load"] == {"requests": 0, "bytes": 0}
