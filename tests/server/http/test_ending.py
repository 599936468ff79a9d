"""A connection stays open after an answer if the server can find the next request's start, and is closed otherwise."""

import contextlib
import http.client
import json
import os

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.messages import SAFETENSORS, ask, message, normal, problem, reply, small
from tests.support.messages import post as post_to
from tests.support.raw_http import answers, get, one, post, talk
from tests.support.sockets import connect

SMALL = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}


GOOD = small()


def test_a_chunk_that_is_none_is_400_and_the_connection_ends(server):
    chunk = b"%x\r\n%s\r\n" % (len(GOOD), GOOD)
    for begin in (b"", chunk[:-1], chunk):  # the last chunk, of size 0, never comes
        name = f"no-chunk-{os.urandom(4).hex()}"
        head = (
            f"POST /attention HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\nContent-Type: {SAFETENSORS}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        )
        with connect(server) as connection:
            connection.sendall(head.encode() + begin + b"no number\r\n")
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.will_close
            assert problem(reply(response), 400, "malformed_body")["request_id"] == name
            assert not connection.recv(1)
        line = server.wait_for_request(name)
        assert (line["status"], line["code"]) == (400, "malformed_body")


def test_a_body_that_is_refused_before_it_has_come_costs_no_connection_where_it_is_short(server):
    """If the server refuses a request before its short body has come, it discards the rest and keeps the connection."""
    refused = message({"q": SMALL["q"], "x": torch.zeros(100_000)})
    head = "POST /attention HTTP/1.1\r\nHost: localhost\r\n"
    with connect(server) as connection:
        for _ in range(2):
            fields = f"Content-Type: {SAFETENSORS}\r\nContent-Length: {len(refused)}\r\n\r\n"
            connection.sendall((head + fields).encode() + refused[:1000])
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert not response.will_close
            problem(reply(response), 422, "invalid_request")
            connection.sendall(refused[1000:])
            connection.sendall(
                f"{head}Content-Type: {SAFETENSORS}\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode() + GOOD
            )
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert reply(response).status == 200


def test_a_body_that_nobody_reads_leaves_its_connection_usable(server):
    """The server answers 404 before the body arrives, discards the body, and answers the next request."""
    with connect(server) as connection:
        connection.sendall(
            b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n" + bytes(1000)
        )
        first = http.client.HTTPResponse(connection)
        first.begin()
        assert (first.status, len(first.read()) > 0) == (404, True)
        connection.sendall(bytes(3_999_000) + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        second = http.client.HTTPResponse(connection)
        second.begin()
        assert second.status == 200


@pytest.mark.slow
def test_an_idle_connection_is_closed_after_the_last_of_its_requests(start_server):
    server = start_server(keep_alive=1)
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, len(answer.read()) > 0) == (200, True)
        assert connection.recv(1) == b""


KEEP = "Connection: keep-alive"


def test_http_1_0_is_kept_alive_where_it_asks(server):
    """An HTTP/1.0 client that asks for keep-alive gets several answers on one connection, even after an error."""
    requests = [get("/health", KEEP, version="1.0"), post("/attention", GOOD, SAFETENSORS, KEEP, version="1.0")]
    requests += [get("/nothing", KEEP, version="1.0"), get("/info", version="1.0")]
    replies = answers(talk(server, b"".join(requests)))
    assert [answer.status for answer in replies] == [200, 200, 404, 200]
    assert [answer.headers["connection"] for answer in replies] == ["keep-alive"] * 3 + ["close"]
    assert replies[1].body == post_to(server, "/attention", GOOD).body


def test_a_stream_without_length_ends_with_its_connection_in_http_1_0(server, job):
    whole = ask(server, f"{job}/events").body
    for fields in ((), (KEEP,)):
        answer = one(talk(server, get(f"{job}/events", *fields, version="1.0")))
        assert "transfer-encoding" not in answer.headers
        assert (answer.headers["connection"], answer.body) == ("close", whole)


def test_a_refused_request_without_a_body_keeps_its_connection(server):
    sockets = set()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)) as connection:
        for method, path in (("GET", "/caches/nobody"), ("DELETE", "/caches/nobody"), ("GET", "/saved/nobody")):
            connection.request(method, path)
            sockets.add(connection.sock)
            answer = connection.getresponse()
            assert json.loads(answer.read())["status"] == answer.status == 404
            assert answer.getheader("connection") != "close"
    assert len(sockets) == 1
