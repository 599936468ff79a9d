"""At SIGTERM no connection is reset: what arrives gets an answer, and what gets none is logged and counted."""

import contextlib
import http.client
import signal
import socket
import ssl
import threading
import time

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.authority import Authority
from tests.support.messages import PATIENCE, SAFETENSORS, message, normal, small

SMALL, LARGE = small(), message({name: normal(8192, 64) for name in "qkv"})
GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def said(connection):
    """Return all that the server sends until it ends its sending; "reset" if it resets the connection."""
    received = b""
    with contextlib.suppress(TimeoutError):
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionError:
            return received or b"reset"
    return received


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_connections_that_come_at_the_stop_get_an_answer_or_are_refused(start_server, workers):
    """Connections every few milliseconds, each with one request, from before SIGTERM until none is established."""
    server = start_server(workers=workers)
    fates, lock, refused = [], threading.Lock(), threading.Event()

    def caller():
        while not refused.is_set():
            try:
                connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
            except OSError:
                refused.set()
                return
            with connection:
                try:
                    time.sleep(0.003)  # the request comes a moment after the connection
                    connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                    answer = said(connection)
                except ConnectionError:
                    answer = b"reset"
            with lock:
                fates.append(answer[:12])

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    while len(fates) < 50:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    for thread in callers:
        thread.join()
    assert server.wait_exit() == 0
    assert set(fates) <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}, {fate: fates.count(fate) for fate in fates}
    assert not [line for line in server.lines if line["event"] == "connections closed without an answer"]


def test_open_connections_end_in_order_at_the_stop(start_server):
    """Idle ones get a FIN, silent new ones are closed and counted, half a head gets 503, and nothing is reset."""
    server = start_server(ready=False)

    def opened(data=b""):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        connection.sendall(data)
        return connection

    idle, silent, half = opened(GET), opened(), opened(GET[:20])
    answer = b""
    while not answer.endswith(b"}"):
        answer += idle.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200")
    server.process.send_signal(signal.SIGTERM)
    assert said(idle) == b""
    answer = said(half)
    assert answer.startswith(b"HTTP/1.1 503"), answer
    assert b'"code": "draining"' in answer
    assert said(silent) == b""
    assert server.wait_exit() == 0
    (line,) = [line for line in server.lines if line["event"] == "connections closed without an answer"]
    assert line["connections"] == 1
    for connection in (idle, silent, half):
        connection.close()


@pytest.fixture(params=["plain", "tls"])
def uploads(request, start_server, tmp_path):
    """Yield a server with a short timeout, and a function that begins an upload to a path of it."""
    settings, context = {}, None
    if request.param == "tls":
        authority = Authority(tmp_path)
        cert, key = authority.give("server")
        settings, context = {"tls_cert": cert, "tls_key": key}, ssl.create_default_context(cafile=authority.file)
    server = start_server(ready=False, shutdown_timeout=0.2, body_timeout=600, **settings)
    server.wait_for_line(lambda line: line["event"] == "ready")

    def begin(path, body, missing, **headers):
        if context is None:
            connection = http.client.HTTPConnection("localhost", server.port, timeout=PATIENCE)
        else:
            connection = http.client.HTTPSConnection("localhost", server.port, timeout=PATIENCE, context=context)
        connection.putrequest("POST", path)
        for name, value in {"Content-Type": SAFETENSORS, "Content-Length": str(len(body) + missing), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        return connection

    return server, begin


def test_an_upload_that_the_stop_cuts_gets_503_and_reads_it(uploads):
    """The body is read directly (safetensors), in chunks of the parser (JSON), or never; the client goes on sending."""
    server, begin = uploads
    cut = {
        "direct": begin("/attention", LARGE[: 1 << 20], len(LARGE) - (1 << 20)),
        "json": begin("/attention", b'{"q": [[1', 10_000_000, **{"Content-Type": "application/json"}),
        "head": begin("/attention", SMALL[:4], 1000),
        "verify": begin("/verify", b"{", 10_000, **{"Content-Type": "application/json"}),
        "infer": begin("/v2/models/attention/infer", b"{", 10_000, **{"Content-Type": "application/json"}),
    }
    time.sleep(0.3)  # the routes have begun to read
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_line(lambda line: line["event"] == "abandoned")
    for name, connection in cut.items():
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                connection.send(bytes(1000))  # what the server reads beside its answer
                time.sleep(0.01)
        response = connection.getresponse()
        text = response.read()
        assert (name, response.status) == (name, 503), text
        kind = "application/json" if name == "infer" else "application/problem+json"
        assert response.headers["content-type"] == kind, (name, response.headers.items())
        assert b"draining" in text or name == "infer", (name, text)
        line = server.wait_for_request(response.headers["x-request-id"])
        assert (line["status"], line["code"]) == (503, "draining")
        connection.close()
    assert server.wait_exit() == 0
    assert not [line for line in server.lines if line["event"] == "failed"]
