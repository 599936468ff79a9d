"""A connection sends and receives tensors without copies, reads early answers, and detects a closed connection."""

import socket
import struct
import threading
import tracemalloc

import numpy as np
import pytest

import flashpoint
from tests.support.framed import BIG, SMALL, TINY, Q, answer, refusal
from tests.support.raw_server import PATIENCE, read_head, read_request, until_closed
from tests.support.scripted_server import message


def test_tensors_go_and_come_without_a_copy(raw, connect):
    received, sent = memoryview(bytearray(1 << 20)), answer(message({"o": BIG}))

    def talk(connection):
        while True:
            _, body, size = read_head(connection)
            left = size - len(body)
            while left > 0:
                left -= connection.recv_into(received, min(left, len(received)))
            connection.sendall(answer() if size > BIG.nbytes else sent)

    client = connect(raw(talk).url, retries=0)
    client.attention(Q, Q, Q)
    tracemalloc.start()
    try:
        client.attention(BIG, TINY, TINY)
        upload = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        o = client.attention(Q, Q, Q)
        download = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert o.nbytes == BIG.nbytes
    assert upload < 4 << 20
    assert download < o.nbytes + (4 << 20)


def test_bytes_keep_their_order_through_small_buffers(raw, connect):
    """With odd sizes and small buffers, each partial send and receive continues at the byte where the last ended."""
    rng = np.random.default_rng(0)
    tensors = [rng.integers(0, 256, (1, n), np.uint8) for n in (1_000_001, 70_001, 5)]

    def talk(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        body = read_request(connection)
        size = 8 + int.from_bytes(body[:8], "little")
        echoed = np.frombuffer(body, np.uint8)[size:]
        connection.sendall(answer(message({"o": echoed})))

    o = connect(raw(talk).url, retries=0).attention(*tensors)
    assert o.tobytes() == b"".join(t.tobytes() for t in tensors)


@pytest.mark.parametrize("after", ["waits", "drains", "closes", "resets"])
def test_an_answer_before_the_end_of_the_request_is_read(raw, connect, after):
    over = threading.Event()

    def talk(connection):
        read_head(connection)
        connection.sendall(refusal(b"413 Content Too Large"))
        if after == "waits":
            over.wait(PATIENCE)
        elif after == "drains":
            until_closed(connection)
        elif after == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    client = connect(raw(talk, receive_buffer=SMALL).url, retries=0)
    for _ in range(1 if after == "waits" else 5):
        with pytest.raises(flashpoint.TooLargeError, match="early"):
            client.attention(BIG, TINY, TINY)
    over.set()


def test_a_server_that_hangs_up_on_a_request_is_a_failed_connection(raw, connect):
    with pytest.raises(flashpoint.ConnectionFailedError):
        connect(raw(read_head, receive_buffer=SMALL).url, retries=0).attention(BIG, TINY, TINY)
