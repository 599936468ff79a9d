"""A client that shuts down its sending side still gets its answers. The requests of one that leaves are dropped."""

import concurrent.futures
import contextlib
import os
import socket
import struct

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.messages import SAFETENSORS, message, normal, small
from tests.support.messages import post as post_to
from tests.support.raw_http import answers, get, one, post, read_to_end, talk
from tests.support.sockets import connect, nothing_inside

GOOD = small()


ALONE = small(backend="reference")


def test_half_a_connection_gets_its_answers(server, job):
    """A client that shuts down sending gets the answers to its complete requests, not to an incomplete last one."""
    large = message({name: normal(1, 8, 4096 if name == "q" else 4, 64, seed=1) for name in "qkv"})  # q, o: 8 MiB each
    for sent in (
        get("/info"), get(f"{job}/events"), get("/health", version="1.0"), post("/attention", GOOD, SAFETENSORS),
        post("/attention", GOOD, SAFETENSORS, version="1.0"), post("/attention", large, SAFETENSORS),
    ):  # fmt: skip
        answer = one(talk(server, sent, half=True))
        assert answer.status == 200
        if sent.endswith(large):
            assert answer.body == post_to(server, "/attention", large).body
    pipelined = post("/attention", GOOD, SAFETENSORS) * 3
    assert [a.status for a in answers(talk(server, pipelined, half=True))] == [200] * 3
    assert [a.status for a in answers(talk(server, pipelined[:-9], half=True))] == [200] * 2
    assert talk(server, pipelined[:-9][len(pipelined) // 3 * 2 :], half=True) == b""
    nothing_inside(server)


def test_a_slow_reader_of_half_a_connection_gets_all(server):
    """A slow reader that has shut down sending gets a complete answer that is larger than the socket buffers."""
    large = message({name: torch.ones(1, 8, 16384 if name == "q" else 4, 64) for name in "qkv"})  # q, o: 32 MiB each
    with connect(server, receive_buffer=4096) as connection:
        connection.sendall(post("/attention", large, SAFETENSORS))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        answer = one(b"H" + read_to_end(connection))
    assert answer.tensors["o"].numel() == 8 * 16384 * 64
    assert bool((answer.tensors["o"] == 1).all())


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_half_a_connection_waits_for_its_answer(gated, version):
    """Two clients shut down sending, one before and one after its request is queued. Both get their answers."""
    names = [f"half-{os.urandom(4).hex()}" for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool, gated.busy(pool, ALONE), contextlib.ExitStack() as held:
        connections = [held.enter_context(connect(gated.server)) for _ in names]
        for name, connection in zip(names, connections, strict=True):
            connection.sendall(post("/attention", ALONE, SAFETENSORS, f"X-Request-Id: {name}", version=version))
            if name == names[0]:
                gated.wait_queued(name)
            connection.shutdown(socket.SHUT_WR)
            gated.wait_queued(name)
        gated.gate("gate").touch()
        for connection in connections:
            assert one(read_to_end(connection)).status == 200


def test_a_client_that_ends_its_sending_and_then_leaves_is_dropped(gated):
    name = f"leaves-{os.urandom(4).hex()}"
    with concurrent.futures.ThreadPoolExecutor() as pool, gated.busy(pool, ALONE):
        with connect(gated.server) as connection:
            connection.sendall(post("/attention", ALONE, SAFETENSORS, f"X-Request-Id: {name}"))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # a client that has left would reset it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close now resets
        gated.wait_dropped(name)
    assert gated.server.wait_for_request(name)["code"] == "client_gone"
    assert not gated.begun(name)
