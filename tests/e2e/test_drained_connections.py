"""A request whose connection a draining server closes without an answer is sent again, to the next server."""

import asyncio
import contextlib
import signal
import socket
import threading

import numpy as np
import pytest

import flashpoint
from tests.support.messages import PATIENCE


class Balancer:
    """A TCP load balancer: the first connection leads to `first`, which is told to stop; later ones lead to `then`.

    It holds the request of the first connection back until `first` has closed this connection, as one does that has
    chosen a server a moment before its stop.
    """

    def __init__(self, first, then):
        self.first, self.then, self.lost = first, then, b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", self.first.port), timeout=PATIENCE) as behind:
            self.lost = client.recv(1 << 16)  # the call is sent: the client cannot know that it was not executed
            self.first.process.send_signal(signal.SIGTERM)
            assert behind.recv(1) == b""  # closed, without an answer
        client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", self.then.port), timeout=PATIENCE) as behind:
            back = threading.Thread(target=_pipe, args=(behind, client))
            back.start()
            _pipe(client, behind)
            back.join()

    def close(self):
        self._thread.join()
        self._listener.close()


def _pipe(source, target):
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


async def _asynchronously(url, tensors):
    async with flashpoint.AsyncClient(url, timeout=PATIENCE) as client:
        return await client.attention(*tensors, with_meta=True)


def _in_a_loop(url, tensors):
    return asyncio.run(_asynchronously(url, tensors))


def _blocking(url, tensors):
    with flashpoint.Client(url, timeout=PATIENCE) as client:
        return client.attention(*tensors, with_meta=True)


@pytest.mark.parametrize("call", [_blocking, pytest.param(_in_a_loop, marks=pytest.mark.slow)])
def test_a_call_whose_connection_a_drain_closed_is_answered_by_the_next_server(start_server, server, call):
    tensors = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 8)).astype(np.float32)
    old = start_server(ready=False)
    balancer = Balancer(old, server)
    try:
        o, meta = call(balancer.url, tensors)
    finally:
        balancer.close()
    assert balancer.lost.startswith(b"POST /attention")
    assert meta.retries == 1
    with flashpoint.Client(server.url) as client:
        np.testing.assert_array_equal(o, client.attention(*tensors))
    assert old.wait_exit() == 0
    (line,) = [line for line in old.lines if line["event"] == "connections closed without an answer"]
    assert line["connections"] == 1
