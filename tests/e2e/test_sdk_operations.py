"""The client retries until a server has started, and the command line uses the server of FLASHPOINT_URL."""

import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint._http.transport import Transport
from tests.support.messages import ask
from tests.support.servers import wait_for

Q = np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float32)


class Watched(Transport):
    """The client's transport, which sets the event `failed` when a connection has failed."""

    def __init__(self, url):
        super().__init__(httpx.URL(url), None)
        self.failed = threading.Event()

    def handle_request(self, request):
        try:
            return super().handle_request(request)
        except httpx.ConnectError:
            self.failed.set()
            raise


@pytest.mark.slow  # it starts a server; the quick tests of retries, in tests/client, use a fake one
def test_a_call_waits_for_a_server_that_is_still_starting(start_server):
    with socket.socket() as reserved:  # bound, not listening: the port refuses connections and is reserved
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        transport = Watched(f"http://127.0.0.1:{port}")
        with (
            flashpoint.Client(f"http://127.0.0.1:{port}", retries=10_000, timeout=600, transport=transport) as client,
            ThreadPoolExecutor() as pool,
        ):
            call = pool.submit(client.attention, Q, Q, Q, with_meta=True)
            assert transport.failed.wait(60)
            start_server(port=port, ready=False)
            o, meta = call.result()
    assert o.shape == Q.shape
    assert meta.retries > 0


def test_the_command_line_asks_the_server_of_the_variable(server):
    """FLASHPOINT_URL is the default of --url, unless an option that excludes --url is given.

    With an empty --url, the command runs without a server.
    """
    assert ask(server, "/info", x_request_id="before-the-command-line").status == 200
    server.wait_for_request("before-the-command-line")  # the lines of earlier tests are in the log now
    earlier = len(server.lines)

    def ran(*arguments):
        command = [sys.executable, "-m", "flashpoint", *arguments]
        environment = os.environ | {"FLASHPOINT_URL": server.url, "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    def asked():
        routes = {line["route"] for line in server.lines[earlier:] if line["event"] == "request"}
        return routes & {"/verify", "/info"}

    process = ran("verify", "--json", "-")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["ok"]
    wait_for(lambda: asked() == {"/verify"}, lambda: list(server.lines))
    assert ran("capacity", "--q-len", "8", "--head-dim", "8", "--tflops", "1", "--network-gbit", "1").returncode == 0
    assert ran("info", "--url", "").returncode == 0
    assert asked() == {"/verify"}
    assert ran("info").returncode == 0
    wait_for(lambda: asked() == {"/verify", "/info"}, lambda: list(server.lines))
