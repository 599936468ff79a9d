"""A server that the machine delays does not blame its clients: it accepts data that arrived in time."""

import contextlib
import os
import signal
import time

import pytest
import torch

from tests.support.messages import SAFETENSORS, message
from tests.support.servers import wait_for
from tests.support.sockets import connect, nothing_inside

BODY = message(
    {name: torch.ones(1, 1, 1 << 14, 4) for name in "qkv"} | {"kv_lengths": torch.ones(1, dtype=torch.int64)}
)
HEAD = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\n".encode()


@contextlib.contextmanager
def stopped(server):
    """Stop the HTTP process inside the block until its body timeout (2 s) has passed."""
    os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        yield
    finally:
        time.sleep(max(0.0, began + 2.5 - time.monotonic()))
        os.kill(server.pid, signal.SIGCONT)


def status_of(connection):
    with connection.makefile("rb") as file:
        return file.readline().split()[1]


@pytest.mark.slow
def test_a_body_that_arrived_while_the_server_was_stopped(gated):
    """The body arrives directly in the staging memory, or in chunks."""
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    framings = {b"Content-Length: %d\r\n\r\n" % len(BODY): BODY, b"Transfer-Encoding: chunked\r\n\r\n": chunked}
    for framing, end in framings.items():
        with connect(gated.server) as connection:
            connection.sendall(HEAD + framing + end[: 1 << 10])
            wait_for(gated.inside, lambda: "it is not inside")
            with stopped(gated.server):
                connection.sendall(end[1 << 10 : 1 << 16])
            connection.sendall(end[1 << 16 :])
            assert status_of(connection) == b"200"
        nothing_inside(gated.server)
