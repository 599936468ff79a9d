"""The transports of both clients work over TLS, with a self-signed certificate made for the tests."""

import ssl

import numpy as np
import pytest

import flashpoint
from flashpoint.commands.app import hint
from flashpoint_contract.wire import MEDIA_TYPE
from tests.support.raw_server import read_head, read_request, until_closed
from tests.support.scripted_server import message

Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
TINY = np.zeros((1, 4), np.float32)


def answer(body, status=b"200 OK", media=MEDIA_TYPE):
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        media.encode(),
        len(body),
        body,
    )


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def tls(request, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = request.param
    context.load_cert_chain(certificate)
    return context


def echo(connection):
    """Answer each request with its q as o. q is the first tensor of the body; the other two are TINY."""
    while (body := read_request(connection)) is not None:
        size = 8 + int.from_bytes(body[:8], "little")
        connection.sendall(answer(message({"o": np.frombuffer(body, np.float32, offset=size)[:-8]})))


def test_tensors_of_any_size_travel_over_one_connection(raw, connect, tls, trusted):
    server = raw(echo, tls=tls)
    client = connect(server.url, retries=0)
    for size in (1, 1 << 12, 1 << 20):
        q = np.random.default_rng(size).standard_normal(size, np.float32)
        assert np.array_equal(client.attention(q[None], TINY, TINY), q)
    assert server.opened == 1


def test_an_answer_before_the_end_of_the_request_is_read(raw, connect, tls, trusted):
    def talk(connection):
        read_head(connection)
        connection.sendall(answer(b'{"code": "early"}', b"413 Content Too Large", "application/problem+json"))

    client = connect(raw(talk, tls=tls, receive_buffer=1 << 16).url, retries=0)
    for _ in range(3):
        with pytest.raises(flashpoint.TooLargeError, match="early"):
            client.attention(np.zeros((1, 4 << 20), np.float32), TINY, TINY)


def test_a_server_that_is_not_trusted_is_sent_nothing(raw, connect, tls):
    received = []

    def talk(connection):
        received.append(connection.recv(1))

    with pytest.raises(flashpoint.ConnectionFailedError, match="certificate verify failed"):
        connect(raw(talk, tls=tls).url, retries=0).attention(Q, Q, Q)
    assert not any(received)


def test_a_certificate_of_another_host_is_refused(raw, connect, tls, trusted):
    server = raw(echo, tls=tls)
    with pytest.raises(flashpoint.ConnectionFailedError, match="certificate verify failed"):
        connect(f"https://127.0.0.1:{server.port}", retries=0).attention(Q, Q, Q)


def test_a_server_that_speaks_no_tls_is_a_failed_connection(scripted, connect):
    with pytest.raises(flashpoint.ConnectionFailedError):
        connect(scripted.url.replace("http", "https", 1), retries=0).attention(Q, Q, Q)


def test_a_handshake_that_never_ends_meets_the_timeout(raw, connect, timed_waits):
    server = raw(until_closed)
    client = connect(server.url.replace("http", "https", 1), timeout=0.2, retries=0)
    with pytest.raises(flashpoint.ConnectionFailedError, match="deadline passed"):
        client.attention(Q, Q, Q)


def test_a_certificate_that_is_not_trusted_is_named_with_what_to_do(raw, connect, tls):
    def talk(connection):
        raise AssertionError("the server got a request")

    server = raw(talk, tls=tls)
    with pytest.raises(
        flashpoint.ConnectionFailedError, match="is not trusted; set SSL_CERT_FILE to the PEM file"
    ) as told:
        connect(server.url, retries=0).info()
    assert hint(told.value) is None
