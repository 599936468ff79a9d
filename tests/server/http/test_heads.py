"""The server refuses a request head that is too large or slow, or has an invalid Host or Transfer-Encoding."""

import concurrent.futures
import contextlib
import http.client
import socket

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import SAFETENSORS, problem, read_metrics, reply, small
from tests.support.raw_http import answers, get, one, post, read_to_end, talk
from tests.support.servers import wait_for
from tests.support.sockets import connect

GOOD = small()


CLOSE = "Connection: close"


HOSTS = {
    "none": "",
    "two": "Host: localhost\r\nHost: localhost",
    "empty": "Host:",
    "with a space": "Host: local host",
    "with a user": "Host: me@localhost",
    "a list": "Host: localhost, localhost",
    "no port": "Host: localhost:http",
    "no address": "Host: [::1",
}


@pytest.mark.parametrize("what", HOSTS)
def test_a_request_has_one_valid_host(server, what):
    answer = one(talk(server, get("/health", host=HOSTS[what])))
    assert "Host" in problem(answer, 400, "malformed_head")["detail"]
    assert answer.headers["connection"] == "close"


def test_trailers_are_no_part_of_a_head_that_is_repeated(server):
    """A Host in the trailers of a request is not part of its head. A later head with two Host fields is refused."""
    lines = "POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    with connect(server) as connection:
        connection.sendall(f"{lines}\r\n1\r\nx\r\n0\r\nHost: localhost\r\n\r\n".encode())
        first = http.client.HTTPResponse(connection)
        first.begin()
        assert (first.status, len(first.read()) > 0) == (404, True)
        connection.sendall(f"{lines}Host: localhost\r\n\r\n0\r\n\r\n".encode())
        problem(one(read_to_end(connection)), 400, "malformed_head")


@pytest.mark.parametrize("path", ["/info", "/caches", "/metrics", "/v2/models/attention"])
def test_cookies_are_not_read(server, path):
    """Python's parser of cookies takes seconds for this one, which the watchdog of the event loop would report."""
    cookie = "Cookie: " + '"' + 30_000 * '\\"'
    assert one(talk(server, get(path, cookie, CLOSE))).status == 200
    lines = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{CLOSE}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    assert one(talk(server, f"{lines}{cookie}\r\n\r\n".encode())).status == 200


def test_a_head_that_differs_from_the_last_one_is_read_anew(server):
    heads = [post("/attention", GOOD, SAFETENSORS, f"X-Priority: {n}") for n in (1, 1, 10, 2)]
    replies = answers(talk(server, b"".join(heads) + post("/attention", GOOD, SAFETENSORS, CLOSE)))
    assert [answer.status for answer in replies] == [200, 200, 422, 200, 200]


def test_a_request_of_http_1_0_has_one_host_at_most(server):
    assert one(talk(server, get("/health", version="1.0", host=""))).status == 200
    assert one(talk(server, get("/health", version="1.0"))).status == 200
    problem(one(talk(server, get("/health", version="1.0", host=HOSTS["two"]))), 400, "malformed_head")


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity", "x\r\nTransfer-Encoding: chunked"])
def test_another_transfer_coding_is_501_and_the_connection_ends(server, coding):
    head = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {coding}\r\n\r\n"
    answer = one(talk(server, head.encode() + b"0\r\n\r\n" + get("/health")))
    assert "Transfer-Encoding" in problem(answer, 501, "transfer_encoding")["detail"]


def test_chunks_within_chunks_are_400(server):
    for coding in ("chunked, chunked", "chunked\r\nTransfer-Encoding: chunked"):
        head = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {coding}\r\n\r\n"
        problem(one(talk(server, head.encode() + b"0\r\n\r\n" + get("/health"))), 400, "malformed_head")


def test_chunks_are_read_whatever_their_name_looks_like_and_not_in_http_1_0(server):
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    fields = f"Host: localhost\r\nContent-Type: {SAFETENSORS}\r\nTransfer-Encoding: Chunked\r\n{CLOSE}\r\n\r\n".encode()
    assert one(talk(server, b"POST /attention HTTP/1.1\r\n" + fields + body)).status == 200
    problem(one(talk(server, b"POST /attention HTTP/1.0\r\n" + fields + body)), 400, "malformed_head")


@pytest.mark.parametrize("fields", [(), ("X-Long: " + 65_600 * "x",), 9 * (f"X-Some: {8000 * 'x'}",)])
@pytest.mark.parametrize("path", ["/info", "/" + 65_600 * "x"])
def test_a_head_over_64_kib_is_431(server, path, fields):
    with connect(server) as connection:
        connection.sendall(get(path, *fields))
        response = http.client.HTTPResponse(connection)
        response.begin()  # at once, because the server may reset the connection after its answer
        answer = reply(response)
    if path == "/info" and not fields:
        assert answer.status == 200
    else:
        problem(answer, 431, "head_too_large")


def test_a_malformed_head_is_counted_and_logged_with_its_peer(server):
    counted = 'flashpoint_requests_total{reason="malformed_head",route="malformed",status="400"}'
    before = read_metrics(server).get(counted, 0)
    with connect(server) as connection:
        peer = "{}:{}".format(*connection.getsockname())
        connection.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        document = problem(one(read_to_end(connection)), 400, "malformed_head")
    logged = server.wait_for_line(lambda line: line["event"] == "malformed request" and line["peer"] == peer)
    assert (logged["request_id"], logged["status"], logged["code"]) == (document["request_id"], 400, "malformed_head")
    assert read_metrics(server)[counted] == before + 1


HEAD = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"


SLOW = [b"", HEAD[:10], HEAD, b"\r\n", HEAD + b"\r\n" + HEAD, HEAD + b"Content-Length: 99\r\n\r\n"]


SHORTER = 40  # seconds; without a timeout of ours, gRPC waits for 120


def wait_closed(server, begin):
    """Open a connection, send `begin` and then single bytes, and wait until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as connection:

        def is_closed():
            try:
                return not connection.recv(1 << 16)
            except TimeoutError:
                if begin:
                    connection.sendall(b"\r\n" if begin == b"\r\n" else b"x")
                return False

        def is_closed_or_reset():
            try:
                return is_closed()
            except ConnectionError:
                return True

        with contextlib.suppress(ConnectionError):
            connection.sendall(begin)
        wait_for(is_closed_or_reset, lambda: f"the connection that began with {begin} is still open")


def test_a_slow_head_is_closed_in_bounded_time(start_server):
    """The server closes a connection that sends a head, blank lines or an unwanted body byte by byte (Slowloris).

    A connection to the port for gRPC that sends nothing is closed, too.
    """
    server = start_server(ready=False, header_timeout=0.3, grpc_port=0)
    port = server.wait_for_line(lambda line: line["event"] == "listening for gRPC")["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=SHORTER) as silent:
        while silent.recv(1 << 16):  # the server sends the first frames of HTTP/2
            pass
    with concurrent.futures.ThreadPoolExecutor(len(SLOW)) as pool:
        list(pool.map(lambda begin: wait_closed(server, begin), SLOW))
