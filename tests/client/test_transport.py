"""The clients' transports handle framings, early answers, broken and idle connections, and deadlines."""

import asyncio
import os
import socket
import struct
import threading
import time
import tracemalloc

import numpy as np
import pytest
import uvloop

import flashpoint
from flashpoint._http import transport
from flashpoint_contract.wire import MEDIA_TYPE
from tests.support.raw_server import PATIENCE, read_head, read_request, until_closed
from tests.support.scripted_server import message
from tests.support.servers import wait_for

Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
TINY = np.zeros((1, 4), np.float32)
BIG = np.zeros((1, 4 << 20), np.float32)  # 16 MiB: more than the buffers from a client to a SMALL receiver
SMALL = 1 << 16  # bytes of a server's receive buffer
GOOD = message({"o": Q})
TYPE = f"Content-Type: {MEDIA_TYPE}\r\n".encode()


def answer(body=GOOD, status=b"200 OK", head=b"", version=b"1.1"):
    return b"HTTP/%b %b\r\n%b%bContent-Length: %d\r\n\r\n%b" % (version, status, TYPE, head, len(body), body)


def unframed(head=b"", body=GOOD, version=b"1.1"):
    return b"HTTP/%b 200 OK\r\n%b%b\r\n%b" % (version, TYPE, head, body)


def chunked(body=GOOD, size=7):
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def refusal(status):
    return answer(b'{"code": "early"}', status, b"Connection: close\r\n").replace(
        TYPE, b"Content-Type: application/problem+json\r\n"
    )


FRAMED = {
    "length": (answer(), True),
    "length of HTTP/1.0": (answer(version=b"1.0"), False),
    "closed after its length": (answer(head=b"Connection: close\r\n"), False),
    "chunked": (unframed(b"Transfer-Encoding: chunked\r\n", chunked()), True),
    "chunked and closed": (unframed(b"Transfer-Encoding: chunked\r\nConnection: Close\r\n", chunked()), False),
    "without a length": (unframed(), False),
    "without a length, HTTP/1.0": (unframed(version=b"1.0"), False),
    "after interim answers": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + answer(), True),
}


@pytest.mark.parametrize("framed", FRAMED.values(), ids=FRAMED)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "byte by byte"])
def test_an_answer_is_read_however_it_is_framed(raw, connect, framed, at_once):
    data, reusable = framed

    def talk(connection):
        while read_request(connection) is not None:
            for piece in [data] if at_once else [data[i : i + 1] for i in range(len(data))]:
                connection.sendall(piece)
            if not reusable:
                return

    server = raw(talk)
    client = connect(server.url, retries=0)
    for _ in range(2):
        o = client.attention(Q, Q, Q)
        assert np.array_equal(o, Q)
        assert o.flags.writeable
    assert server.opened == (1 if reusable else 2)


@pytest.mark.parametrize("framed", ["length", "chunked"])
def test_bytes_behind_an_answer_are_not_taken_for_the_next_one(raw, connect, framed):
    def talk(connection):
        read_request(connection)
        connection.sendall(FRAMED[framed][0] + b"HTTP")
        until_closed(connection)

    server = raw(talk)
    client = connect(server.url, retries=0)
    for _ in range(2):
        assert np.array_equal(client.attention(Q, Q, Q), Q)
    assert server.opened == 2


BROKEN = {
    "nothing": b"",
    "half a head": answer()[:30],
    "no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
    "a head without end": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 40_000,
    "two lengths": answer(head=b"Content-Length: 3\r\n"),
    "half an answer": answer()[:-8],
    "half a chunk": unframed(b"Transfer-Encoding: chunked\r\n", chunked()[:-20]),
    "malformed chunks": unframed(b"Transfer-Encoding: chunked\r\n", b"zz\r\n"),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_answer_is_a_failed_connection(raw, connect, data):
    def talk(connection):
        read_request(connection)
        connection.sendall(data)

    server = raw(talk)
    with pytest.raises(flashpoint.ConnectionFailedError):
        connect(server.url, retries=0).attention(Q, Q, Q)
    assert server.opened == 1


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
    """With odd sizes in pieces, every partial send and receive continues where the previous one stopped."""
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


def test_an_interim_answer_does_not_end_the_request(raw, connect):
    received = []

    def talk(connection):
        _, body, size = read_head(connection)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        data = bytearray(body)
        while len(data) < size:
            data += connection.recv(1 << 20)
        received.append(len(data) - size)
        connection.sendall(answer())
        until_closed(connection)

    client = connect(raw(talk).url, retries=0)
    assert np.array_equal(client.attention(BIG, TINY, TINY), Q)
    assert received == [0]
    client.close()


def test_a_server_that_hangs_up_on_a_request_is_a_failed_connection(raw, connect):
    with pytest.raises(flashpoint.ConnectionFailedError):
        connect(raw(read_head, receive_buffer=SMALL).url, retries=0).attention(BIG, TINY, TINY)


def test_a_connection_that_was_closed_while_idle_is_replaced(raw, connect):
    def talk(connection):
        read_request(connection)
        connection.sendall(answer())

    server = raw(talk)
    client = connect(server.url, retries=0)
    for round in (1, 2, 3):
        assert np.array_equal(client.attention(Q, Q, Q), Q)
        wait_for(lambda round=round: server.closed == round, lambda: "the connection stays open")
    assert server.opened == 3


def test_a_connection_that_was_idle_for_long_is_not_used_again(scripted, connect, monkeypatch):
    client = connect(scripted.url)
    client.attention(Q, Q, Q)
    client.attention(Q, Q, Q)
    assert scripted.connections == 1
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0)
    client.attention(Q, Q, Q)
    assert scripted.connections == 2


def test_no_more_idle_connections_are_kept_than_there_may_be(scripted, monkeypatch):
    monkeypatch.setattr(transport, "IDLE_CONNECTIONS", 1)
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def together(handler):
        barrier.wait()
        handler.answer(body=GOOD)

    async def run():
        async with flashpoint.AsyncClient(scripted.url) as client:
            for _ in range(2):
                scripted.script.extend([together] * 2)
                await asyncio.gather(*(client.attention(Q, Q, Q) for _ in range(2)))

    asyncio.run(run())
    assert scripted.connections == 3


def test_closing_the_client_closes_its_connections(raw, connect):
    def talk(connection):
        read_request(connection)
        connection.sendall(answer())
        until_closed(connection)

    server = raw(talk)
    client = connect(server.url)
    client.attention(Q, Q, Q)
    assert server.closed == 0
    client.close()
    wait_for(lambda: server.closed == 1, lambda: "the connection stays open")


def test_a_client_closed_under_a_call_lets_it_end_and_keeps_nothing(raw):
    closed = threading.Event()

    def talk(connection):
        read_request(connection)
        connection.sendall(answer()[:-8])
        closed.wait(PATIENCE)
        connection.sendall(answer()[-8:])
        until_closed(connection)

    server = raw(talk)
    client = flashpoint.Client(server.url, retries=0)
    results = []
    thread = threading.Thread(target=lambda: results.append(client.attention(Q, Q, Q)))
    thread.start()
    wait_for(lambda: server.opened == 1, lambda: "nobody connects")
    client.close()
    closed.set()
    thread.join()
    assert np.array_equal(results[0], Q)
    wait_for(lambda: server.closed == 1, lambda: "the connection stays open")


@pytest.mark.parametrize("where", ["within its answer", "within the request"])
def test_a_server_that_falls_silent_meets_the_timeout(raw, connect, where):
    def talk(connection):
        read_request(connection)
        connection.sendall(answer())
        read_head(connection)
        if where == "within its answer":
            connection.sendall(answer()[:-40])
        over.wait(PATIENCE)

    over = threading.Event()
    client = connect(raw(talk, receive_buffer=SMALL).url, retries=0)
    client.attention(Q, Q, Q)  # the next call's timeout expires after the connect
    with pytest.raises(flashpoint.DeadlineExceededError):
        client.attention(BIG if where == "within the request" else Q, TINY, TINY, timeout=0.2)
    over.set()


@pytest.mark.parametrize("when", ["sending", "waiting", "receiving"])
def test_a_cancelled_call_closes_its_connection(raw, when):
    scripts = [True]

    async def run():
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def talk(connection):
            if not scripts:
                read_request(connection)
                return connection.sendall(answer())
            scripts.pop()
            read_head(connection)
            if when == "receiving":
                connection.sendall(answer()[:-8])
            loop.call_soon_threadsafe(reached.set)
            while when == "sending" and not call.done():
                time.sleep(0.01)
            return until_closed(connection)

        server = raw(talk, receive_buffer=SMALL)
        async with flashpoint.AsyncClient(server.url, retries=0) as client:
            call = asyncio.create_task(client.attention(BIG if when == "sending" else Q, Q, Q))
            await reached.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(wait_for, lambda: server.closed == 1, lambda: "the connection stays open")
            assert np.array_equal(await client.attention(Q, Q, Q), Q)

    asyncio.run(run())


def test_the_async_client_runs_in_uvloop(scripted):
    done = threading.Event()

    async def run():
        async with flashpoint.AsyncClient(scripted.url) as client:
            big = BIG[:, : 1 << 20] + 1
            actual = await asyncio.gather(*(client.attention(big + i, TINY, TINY) for i in range(4)))
            assert all(np.array_equal(o, big + i) for i, o in enumerate(actual))
            scripted.script.append(lambda h: done.wait(PATIENCE))
            with pytest.raises(flashpoint.DeadlineExceededError):
                await client.attention(Q, Q, Q, timeout=0.1)

    uvloop.run(run())
    done.set()


@pytest.mark.parametrize("no_proxy", [False, True])
def test_a_proxy_of_the_environment_is_asked_unless_it_is_excepted(raw, scripted, connect, monkeypatch, no_proxy):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    requests = []

    def talk(connection):
        head, body, size = read_head(connection)
        while len(body) < size:
            body += connection.recv(1 << 16)
        requests.append(head.split(b" ")[1].decode())
        connection.sendall(refusal(b"403 Forbidden"))

    monkeypatch.setenv("http_proxy", raw(talk).url)
    monkeypatch.setenv("no_proxy", "127.0.0.1" if no_proxy else "")
    client = connect(scripted.url)
    if no_proxy:
        assert np.array_equal(client.attention(Q, Q, Q), Q)
    else:
        with pytest.raises(flashpoint.AuthenticationError):
            client.attention(Q, Q, Q)
    assert requests == ([] if no_proxy else [f"{scripted.url}/attention"])
