"""The server reuses memory, and yet no answer contains bytes of another request, even for slow readers."""

import concurrent.futures
import contextlib
import resource
import textwrap

import pytest
from annotated_types import Le

from flashpoint_server.config.settings import LONGEST, Settings
from tests.support.constant_answers import ROWS, constant, shows_only, values_of
from tests.support.messages import post
from tests.support.servers import wait_for
from tests.support.sockets import connect, nothing_inside, read_all, segments, send


def longest():
    """Return {setting: longest allowed value} of the timeouts whose longest allowed value is eleven days."""
    bounds = [(name, bound) for name, field in Settings.model_fields.items() for bound in field.metadata]
    return {name: bound.le for name, bound in bounds if bound in (Le(LONGEST), Le(1000 * LONGEST))}


@pytest.fixture(scope="module")
def patient(start_server):
    """Start a server with timeouts of eleven days, so that none expires on a slow machine."""
    return start_server(**longest())


@pytest.mark.slow
def test_canary_slow_readers_and_reused_memory_show_nobody_elses_bytes(patient):
    """Six slow readers get right answers, while fifty other requests are answered, sent in part or abandoned."""
    server = patient
    slow = [(value, send(server, constant(value))) for value in range(1, 7)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(post, server, "/attention", constant(-value, 1 << 11)) for value in range(1, 31)]
        for value in range(10):
            body = constant(1000 + value)
            with send(server, body[: len(body) // 2], length=len(body)):
                pass  # the client sends half a body and leaves
            with send(server, body):
                pass  # the client leaves before its answer
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


@pytest.mark.slow
def test_a_time_may_be_as_long_as_the_settings_allow(patient):
    """A server with timeouts of eleven days answers: no timer of the system or the event loop overflows."""
    assert {"body_timeout", "header_timeout", "keep_alive", "max_timeout_ms", "shutdown_timeout"} <= set(longest())
    assert shows_only(post(patient, "/attention", constant(4, 8)), 4)


@pytest.mark.slow
def test_canary_on_a_server_that_is_not_ours(start_server, tmp_path):
    """Under plain uvicorn, which does not report when it has sent a buffer, answers have no bytes of other requests."""
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
    for _ in range(3):  # the pool of memory segments grows to the size that these requests need
        assert shows_only(post(server, "/attention", constant(3)), 3)
    before = segments(server.pid)
    for value in range(4):
        assert shows_only(post(server, "/attention", constant(value)), value)
    assert segments(server.pid) == before
    giant = post(server, "/attention", constant(5, 20 * ROWS))  # 160 MiB in, 160 MiB out
    assert shows_only(giant, 5)
    wait_for(lambda: segments(server.pid) == before, lambda: "a giant's segment stays")
    assert shows_only(post(server, "/attention", constant(6)), 6)  # before this, the engine unmaps the large segment
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
