"""A server that cannot start prints the reason and the remedy. At its stop, a timeout or a second signal ends it."""

import concurrent.futures
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint_server.cli import ports
from flashpoint_server.cli.ports import open_to_all
from flashpoint_server.config.settings import Settings
from tests.support.gated import GatedServer
from tests.support.messages import PATIENCE, problem, small
from tests.support.servers import wait_for

FLASHPOINT = Path(sys.executable).parent / "flashpoint"


def serve(*flags):
    done = subprocess.run(
        [FLASHPOINT, "serve", "--log-format", "json", *flags], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("flags", "error", "advice"),
    [
        (["--port", "{taken}"], "port {taken} is in use by another program", "set --port (FLASHPOINT_PORT) to another"),
        (["--host", "no-such-host.invalid"], "the host name 'no-such-host.invalid' has no address", "set --host"),
        (["--host", "192.0.2.1", "--insecure"], "192.0.2.1 is no address of this machine", "127.0.0.1"),
    ],
)
def test_a_port_or_host_that_cannot_be_used(flags, error, advice):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, lines = serve(*("--port", "0") if "--port" not in flags else (), *(f.format(taken=port) for f in flags))
    (line,) = lines
    assert (code, line["event"], line["error"]) == (1, "cannot listen", error.format(taken=port))
    assert advice in line["advice"]


@pytest.mark.slow
def test_a_device_that_is_not_there_is_one_sentence():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, lines = serve("--port", "0", "--device", "cuda")
    sentence = "device cuda is not available: torch finds no CUDA device; set --device cpu"
    assert code == 1
    assert [line["error"] for line in lines if line["event"] == "broken"] == [sentence]
    assert [line["reason"] for line in lines if line["event"] == "failed"] == [sentence]
    assert all("exception" not in line for line in lines)


@pytest.fixture
def background():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.slow
def test_work_beyond_the_shutdown_timeout_is_refused_and_left(start_server, background, tmp_path):
    gated = GatedServer(start_server, tmp_path, shutdown_timeout=0.1)
    server = gated.server
    with gated.busy(background, small(backend="reference")) as running:
        queued = gated.post(background, "queued", small(backend="reference"))
        server.process.send_signal(signal.SIGTERM)
        problem(running.result(), 503, "draining")
        problem(queued.result(), 503, "draining")
        assert server.wait_exit() == 0
    assert [line["requests"] for line in server.lines if line["event"] == "abandoned"] == [2]


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(start_server, background, tmp_path):
    gated = GatedServer(start_server, tmp_path, shutdown_timeout=3600)
    server = gated.server
    with gated.busy(background, small(backend="reference")) as running:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line(lambda line: line["event"] == "draining")
        server.process.send_signal(signal.SIGINT)
        problem(running.result(), 503, "draining")
        assert server.wait_exit() == 1


def test_without_descriptors_the_log_says_that_connections_are_dropped(server):
    used = {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (max(used) + 1, before[1]))
    try:
        with contextlib.ExitStack() as held:
            for _ in range(max(used) + 1):  # more connections than free descriptors
                connection = held.enter_context(socket.socket())
                connection.settimeout(PATIENCE)
                connection.connect(("127.0.0.1", server.port))
            said = server.wait_for_line(lambda line: line["event"] == "connections are dropped")
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    assert said["limit"] == max(used) + 1
    wait_for(lambda: reached(server), lambda: "no connection is taken any more")


def reached(server):
    try:
        return server.get("/health")[0] == 200
    except (ConnectionError, json.JSONDecodeError):
        return False


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", None),
        ("127.3.2.1", None),
        ("localhost", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("", "0.0.0.0"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("192.0.2.1", "192.0.2.1"),
    ],
)
def test_an_address_that_others_reach_is_known_as_one(host, expected, tmp_path):
    """`open_to_all` returns an address that other machines reach, or None if keys or client certificates protect it.

    `192.0.2.1` is reserved for documentation, so no machine has it.
    """
    settings = Settings(host=host)
    assert open_to_all(settings) == expected
    assert open_to_all(settings.model_copy(update={"tls_client_ca": tmp_path})) is None
    assert open_to_all(Settings(host=host, api_keys="k")) is None
    assert open_to_all(Settings(host=host, insecure=True)) == expected  # the server logs a warning, and starts
    assert Settings().host == "127.0.0.1"


def test_variables_of_other_servers_have_no_effect(start_server):
    variables = {"WEB_CONCURRENCY": "auto", "FORWARDED_ALLOW_IPS": "*", "UVICORN_PORT": "1", "PORT": "x", "LINES": "x"}
    assert start_server(ready=False, environment=variables).get("/health/live")[0] == 200


def test_the_host_of_every_ipv6_address_is_reached_by_ipv4():
    with ports.listen(Settings(host="::", port=0)) as listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1])).close()
