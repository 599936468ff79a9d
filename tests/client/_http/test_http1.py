"""The client reads an answer with any HTTP/1.1 framing. It treats a malformed answer as a failed connection."""

import numpy as np
import pytest

import flashpoint
from tests.support.framed import BIG, TINY, Q, answer, chunked, unframed
from tests.support.raw_server import read_head, read_request, until_closed

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
