"""The processes of the service share memory safely: no caller reads another's bytes, and the memory of clients and
processes that vanish is released."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import resource
import signal
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
import torch
from annotated_types import Le

from flashpoint_server.config.settings import LONGEST, Settings
from flashpoint_server.processes.parent import NICENESS
from tests.conftest import DEVICE
from tests.support.messages import JSON, SAFETENSORS, message, normal, post, problem, read_metrics
from tests.support.servers import wait_for
from tests.support.sockets import connect, nothing_inside, read_all, segments, send

QKV = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}
SMALL = message(QKV)
ROWS = 1 << 13


def constant(value, rows=ROWS):
    """Return a request whose answer, (1, 4, rows, 64) float32, is `value` everywhere; by default 8 MiB."""
    zeros = {name: torch.zeros(1, 4, n, 64) for name, n in (("q", rows), ("k", 1))}
    return message({**zeros, "v": torch.full((1, 4, 1, 64), float(value))})


def shows_only(answer, value):
    return bool((answer.tensors["o"] == value).all())


def values_of(body):
    """Return the distinct values of a float32 answer."""
    return set(
        torch.frombuffer(bytearray(body[8 + int.from_bytes(body[:8], "little") :]), dtype=torch.float32).tolist()
    )


def longest():
    """Return the longest times that the settings allow: eleven days."""
    bounds = [(name, bound) for name, field in Settings.model_fields.items() for bound in field.metadata]
    return {name: bound.le for name, bound in bounds if bound in (Le(LONGEST), Le(1000 * LONGEST))}


@pytest.fixture(scope="module")
def patient(start_server):
    """Start a server that never gives up a body or an answer, however slow the machine is."""
    return start_server(**longest())


@pytest.mark.slow
def test_canary_slow_readers_and_reused_memory_show_nobody_elses_bytes(patient):
    """Answers wait unread while fifty others are computed, sent, cut off and cancelled."""
    server = patient
    slow = [(value, send(server, constant(value))) for value in range(1, 7)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(post, server, "/attention", constant(-value, 1 << 11)) for value in range(1, 31)]
        for value in range(10):
            body = constant(1000 + value)
            with send(server, body[: len(body) // 2], length=len(body)):
                pass  # half a body, then gone
            with send(server, body):
                pass  # gone before its answer
        for value, answer in enumerate(busy, 1):
            assert shows_only(answer.result(), -value)
    for value, connection in slow:
        assert values_of(read_all(connection)) == {float(value)}
    nothing_inside(server)


@pytest.mark.slow
def test_a_client_that_never_reads_holds_up_nobody(patient):
    server = patient
    with contextlib.ExitStack() as stack:
        for value in range(8):
            stack.enter_context(send(server, constant(value)))
        wait_for(lambda: server.get("/info")[1]["load"]["requests"] >= 8, lambda: "they never got in")
        assert shows_only(post(server, "/attention", constant(77)), 77)
    nothing_inside(server)


def wide(value, rows):
    """Like `constant`, with small tensors: the answer, (1, 4, rows, 256) float32, is 256 times the body's size."""
    q, k = torch.zeros(1, 4, rows, 1), torch.zeros(1, 4, 1, 1)
    return message({"q": q, "k": k, "v": torch.full((1, 4, 1, 256), float(value))})


def unread(server, value, name):
    """Return a connection on which the server sends 16 MiB, more than the socket buffers hold."""
    return send(server, wide(value, 1 << 12), request_id=name, receive_buffer=1 << 16)


def given_up(server, name):
    """Wait for the log line that says that the server gave up this request's answer, and return it."""
    line = server.wait_for_request(name)
    assert (line["status"], line["code"]) == (200, "answer_timeout")
    return line


@pytest.mark.slow
def test_an_answer_that_nobody_takes_is_dropped_after_a_while(gated):
    with unread(gated.server, 2, "untaken"):
        given_up(gated.server, "untaken")
        nothing_inside(gated.server)
    assert post(gated.server, "/attention", SMALL).status == 200


@pytest.mark.slow
def test_a_time_may_be_as_long_as_the_settings_allow(patient):
    """Eleven days are not too long for any timer of the system or of an event loop."""
    assert {"body_timeout", "header_timeout", "keep_alive", "max_timeout_ms", "shutdown_timeout"} <= set(longest())
    assert shows_only(post(patient, "/attention", constant(4, 8)), 4)


@pytest.mark.slow
def test_canary_on_a_server_that_is_not_ours(start_server, tmp_path):
    """The application runs under plain uvicorn, which does not report when its buffers are free."""
    program = tmp_path / "plain.py"
    program.write_text(
        textwrap.dedent("""
        import json, signal, socket, sys
        import uvicorn
        from flashpoint_server import Settings, create_app

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        line = {"event": "listening", "port": port, "url": f"http://127.0.0.1:{port}"}
        print(json.dumps(line), file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has stopped
        settings = Settings(device="cpu", log_level="error", body_timeout=3600)
        config = uvicorn.Config(create_app(settings), log_config=None)
        uvicorn.Server(config).run(sockets=[listener])
        """)
    )
    server = start_server(program=(str(program),))
    slow = [(value, send(server, constant(value))) for value in range(1, 5)]
    for value in range(1, 31):
        assert shows_only(post(server, "/attention", constant(-value)), -value)
    for value, connection in slow:
        assert values_of(read_all(connection)) == {float(value)}
    nothing_inside(server)


@pytest.mark.slow
def test_memory_is_reused_and_giants_are_given_back(server):
    nothing_inside(server)
    for _ in range(3):  # the pool grows to its needed size
        assert shows_only(post(server, "/attention", constant(3)), 3)
    before = segments(server.pid)
    for value in range(4):
        assert shows_only(post(server, "/attention", constant(value)), value)
    assert segments(server.pid) == before
    giant = post(server, "/attention", constant(5, 20 * ROWS))  # 160 MiB in, 160 MiB out
    assert shows_only(giant, 5)
    wait_for(lambda: segments(server.pid) == before, lambda: "a giant's segment stays")
    assert shows_only(post(server, "/attention", constant(6)), 6)  # the engine unmaps it before this
    wait_for(lambda: segments(server.engine_pid) <= before, lambda: "the engine keeps a giant's segment")


def test_a_thousand_idle_connections(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        with contextlib.ExitStack() as idle:
            for _ in range(1000):
                idle.enter_context(connect(server))
            assert shows_only(post(server, "/attention", constant(9, 64)), 9)
            assert server.get("/health/ready")[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_http_processes_do_not_load_torch(server):
    assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.engine_pid}/maps").read_text()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's engine computes on no core")
def test_every_thread_of_an_engine_leaves_the_cores_to_http_first(server):
    post(server, "/attention", message({name: normal(1, 2, 512, 64) for name in "qkv"}))
    threads = [int(thread) for thread in os.listdir(f"/proc/{server.engine_pid}/task")]
    http = os.getpriority(os.PRIO_PROCESS, server.pid)
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {http + NICENESS}


def test_a_killed_engine_costs_what_it_had_begun_and_no_more(gated):
    """The running requests are refused, the benchmark fails, and the next engine answers the waiting requests."""
    server, engine = gated.server, gated.server.engine_pid
    before, alone = post(server, "/attention", SMALL), message(QKV, backend="reference")
    timed = {"shapes": [{"q_len": 8, "head_dim": 8}], "backends": ["naive"]}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with gated.busy(pool, alone) as running:
            waiting = [gated.post(pool, "waits", alone) for _ in range(6)]
            benchmark = post(server, "/benchmark", json.dumps(timed).encode(), JSON)
            assert benchmark.status == 202
            gated.gate("closed").touch()  # the next engine waits at its start
            os.kill(engine, signal.SIGKILL)
            problem(running.result(), 503, "engine_lost")
            assert running.result().headers["retry-after"]
            wait_for(lambda: server.get("/health/ready")[0] == 503, lambda: "ready without an engine")
            problem(post(server, "/attention", SMALL), 503, "not_ready")
            assert server.get("/health/live")[0] == 200
            gated.gate("closed").unlink()
        assert all(answer.result().status == 200 for answer in waiting)
    server.wait_ready()
    assert server.engine_pid != engine
    assert not psutil.pid_exists(engine)  # not even as a zombie
    job = server.get(benchmark.headers["location"])[1]
    assert (job["state"], job["errors"]) == ("failed", ["the engine died"])
    assert post(server, "/attention", SMALL).body == before.body
    nothing_inside(server)


def test_a_stopped_engine_is_not_ready_and_answers_when_it_goes_on(server):
    """A signal stops it, as a debugger would: the process lives but reads nothing."""
    engine, before = server.engine_pid, post(server, "/attention", SMALL)
    nothing_inside(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_for(lambda: server.get("/health/ready")[0] == 503, lambda: "ready, with an engine that does nothing")
            assert "stopped" in server.get("/health/ready")[1]["detail"]
            assert server.get("/v2/health/ready")[0] == 503
            assert server.get("/v2/models/attention/ready")[0] == 503
            waits = pool.submit(post, server, "/attention", SMALL)
            wait_for(lambda: server.get("/info")[1]["load"]["requests"] == 1, lambda: "it never got in")
        finally:
            os.kill(engine, signal.SIGCONT)
        assert waits.result().body == before.body
    server.wait_ready()
    assert server.engine_pid == engine


def test_an_engine_that_cannot_map_a_segment_drops_it_and_serves_on(gated):
    """One request's memory exceeds its address space: that request is refused, and the next ones are answered."""
    server, engine = gated.server, gated.server.engine_pid
    # Idle memory of other tests, at most 80 MiB, may be released first.
    room = psutil.Process(engine).memory_info().vms + (16 << 20)
    before = resource.prlimit(engine, resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    try:
        problem(post(server, "/attention", wide(1, 1 << 15)), 503, "out_of_memory")  # 128 MiB
    finally:
        resource.prlimit(engine, resource.RLIMIT_AS, before)
    server.wait_ready()
    assert post(server, "/attention", SMALL).status == 200
    assert server.engine_pid == engine
    nothing_inside(server)


def test_work_that_never_fits_the_staging_memory_is_413(gated):
    problem(post(gated.server, "/attention", wide(1, 1 << 17)), 413, "work_too_large")
    assert post(gated.server, "/attention", SMALL).status == 200


@pytest.mark.slow
def test_an_answer_given_up_is_never_another_requests(gated):
    """Clients read nothing until their answers are given up, and then the rest; others reuse the memory."""
    server, over = gated.server, threading.Event()
    connections = {f"slow-{value}": (value, unread(server, value, f"slow-{value}")) for value in range(1, 5)}

    def reuse():
        while not over.is_set():
            with contextlib.suppress(http.client.HTTPException, ConnectionError):  # if this one is given up, too
                post(server, "/attention", wide(-1, 1 << 12))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reusing = pool.submit(reuse)
        try:
            for name in connections:
                given_up(server, name)
        finally:
            over.set()
        reusing.result()
    for value, connection in connections.values():
        received = bytearray()
        with connection, contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 20):
                received += piece
        answer = bytes(received).split(b"\r\n\r\n", 1)[1]
        start = 8 + int.from_bytes(answer[:8], "little")
        whole = answer[start : start + (len(answer) - start) // 4 * 4]
        assert whole
        assert set(torch.frombuffer(bytearray(whole), dtype=torch.float32).tolist()) == {float(value)}


def test_a_request_behind_a_direct_body_may_close_with_bytes_behind_it(server):
    body = constant(4, 1 << 10)
    request = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\n"
    request += f"Content-Length: {len(body)}\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(request.encode() + body)
        with connection.makefile("rb") as file:
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\nGET /x")
            assert b"HTTP/1.1 200 OK" in file.read()


@pytest.mark.slow
def test_several_workers_on_one_port_survive_each_others_death(start_server):
    server = start_server(workers=2)
    wait_for(lambda: len(server.children("cli.worker")) == 2, lambda: "two workers")
    engine, (victim, other) = server.engine_pid, server.children("cli.worker")
    expected = post(server, "/attention", SMALL).body
    answered = 'flashpoint_ended_total{how="answered"}'  # of all workers, including the dead one
    wait_for(lambda: read_metrics(server).get(answered) == 1, lambda: "the first answer is not counted")
    os.kill(victim, signal.SIGKILL)
    server.wait_for_line(lambda line: line["event"] == "lost" and line["pid"] == victim)
    for _ in range(8):
        assert post(server, "/attention", SMALL).body == expected
    wait_for(lambda: len(set(server.children("cli.worker")) - {victim, other}) == 1, lambda: "another worker")
    assert server.engine_pid == engine
    assert not psutil.pid_exists(victim)
    wait_for(lambda: read_metrics(server)[answered] == 9, lambda: "answers are not counted")
    assert read_metrics(server)["flashpoint_accepted_total"] == 9
    wait_for(lambda: read_metrics(server)["flashpoint_queue_requests"] == 0, lambda: "requests that never leave")
    wait_for(lambda: len(segments(engine)) <= 2, lambda: "the engine keeps a dead worker's memory")
    family = [server.engine_pid, *server.children("cli.worker")]
    server.stop()
    assert not any(psutil.pid_exists(pid) for pid in family)


@pytest.mark.slow
def test_limits_hold_over_all_workers_and_a_dead_one_has_nothing_inside(start_server):
    """An unsent body takes the only place from both workers, until the worker that has it dies."""
    server = start_server(workers=2, queue_limit=1)
    wait_for(lambda: workers_ready(server) == 2, lambda: f"{workers_ready(server)} of two workers are ready")
    with send(server, SMALL[:-1], length=len(SMALL)) as unsent:
        wait_for(lambda: server.get("/info")[1]["load"]["requests"] == 1, lambda: "it never comes inside")
        for _ in range(16):
            answer = post(server, "/attention", SMALL)
            assert problem(answer, 429, "queue_full")["detail"].startswith("the queue is full: it has 1 requests")
        (victim,) = [pid for pid in server.children("cli.worker") if connected_to(pid, unsent)]
        os.kill(victim, signal.SIGKILL)
        server.wait_for_line(lambda line: line["event"] == "lost" and line["pid"] == victim)
        wait_for(lambda: server.get("/info")[1]["load"] == {"requests": 0, "bytes": 0}, lambda: "it stays inside")
        assert post(server, "/attention", SMALL).status == 200


def workers_ready(server):
    """Return how many HTTP processes have reported that they take work."""
    return len([line for line in list(server.lines) if line["event"] == "ready"])


def connected_to(pid, connection):
    """Return whether the process has the other end of the connection."""
    return connection.getsockname() in [c.raddr for c in psutil.Process(pid).net_connections() if c.raddr]


@pytest.mark.parametrize("ready", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["starting", "ready"])
def test_a_killed_server_leaves_no_process(start_server, ready):
    server = start_server(ready=ready)
    wait_for(lambda: server.children("engine.process"), lambda: "no engine")
    family = [p.pid for p in psutil.Process(server.pid).children(recursive=True)]
    server.process.kill()
    assert server.wait_exit() == -signal.SIGKILL
    wait_for(lambda: not any(map(_alive, family)), lambda: f"left behind: {family}")


def _alive(pid):
    """Return whether it runs; the new parent of an orphan reaps its zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("expect", [True, False], ids=["100-continue", "at-once"])
def test_a_refusal_from_the_head_comes_before_the_body(server, expect):
    """Without any body, the answer is 422, and no 100 comes before it."""
    bad = message({"q": torch.zeros(2, 1, 4096, 64), "k": torch.zeros(2, 1, 8, 32), "v": torch.zeros(2, 1, 8, 64)})
    head = bad[: 8 + int.from_bytes(bad[:8], "little")]
    with connect(server) as connection:
        lines = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\n"
        lines += f"Content-Length: {len(bad)}\r\n"
        if expect:
            lines += "Expect: 100-continue\r\n"
        connection.sendall(f"{lines}\r\n".encode() + (b"" if expect else head))
        if expect:
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 422 ")


def test_two_requests_on_one_connection_at_once(server):
    """They are pipelined: one packet has the last bytes of the first request and the second head."""
    body = constant(4, 1 << 10)
    request = (
        f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n"
    )
    with connect(server) as connection:
        connection.sendall((f"{request}\r\n".encode() + body) + f"{request}Connection: close\r\n\r\n".encode() + body)
        with connection.makefile("rb") as file:
            answers = file.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    first, second = answers.split(b"HTTP/1.1 200 OK")[1:]
    assert values_of(first.split(b"\r\n\r\n", 1)[1]) == values_of(second.split(b"\r\n\r\n", 1)[1]) == {4.0}
