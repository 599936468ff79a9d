"""Every answer has an id, may not be stored, and has a media type that browsers do not guess."""

import http.client
import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_server.http.request import HTTP_ALONE, REPLICA_FIELD, Request
from tests.support.messages import JSON, ask, post, reply, small
from tests.support.raw_http import one, talk
from tests.support.sockets import connect

PAGES = {"/", "/docs", "/docs/errors", "/docs/tutorial"}


def check(answer, caching="no-store"):
    assert answer.headers["cache-control"] == caching, answer
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-request-id"]


def test_each_route_answers_each_method_with_the_fields(server):
    paths = ask(server, "/openapi.json").json["paths"]
    assert len(paths) > 20
    for path in {*paths, "/openapi.json", "/nothing", "/static/nothing.js"} - PAGES:
        for method in ("GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS"):
            check(ask(server, path.replace("{format}", "svg"), method))
    for path in PAGES:
        check(ask(server, path), "no-cache")
        check(ask(server, path, "POST"))


def test_answers_that_are_sent_in_other_ways_have_the_fields(server, strict):
    check(post(server, "/attention", small()))  # without ASGI
    check(post(server, "/attention", b"", JSON))  # refused by its route
    check(post(server, "/attention", small(), accept="text/html"))
    check(ask(strict, "/caches"))  # without a key
    check(ask(strict, "/", host="elsewhere.example"))  # refused by the envelope
    check(ask(strict, "/info", "OPTIONS", origin="https://friend.example", access_control_request_method="GET"))
    check(one(talk(server, b"no HTTP at all\r\n\r\n")))  # refused by the parser
    check(one(talk(server, b"GET / HTTP/1.1\r\n\r\n")))  # a head without a Host field
    chunked = b"POST /attention HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n"
    check(one(talk(server, chunked)))
    head = f"POST /verify HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\nContent-Type: {JSON}\r\n"
    body = json.dumps({"shape": {"q_len": 4, "head_dim": 8}}).encode()
    with connect(server) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        response = http.client.HTTPResponse(connection)
        response.begin()
        check(reply(response))


def test_a_replica_is_named_and_only_a_field_of_the_answer_itself_replaces_no_store():
    request = Request("GET", "/", {}, "an-id", replica="a")
    plain = dict(request.answer_fields([(b"x", b"y")]))
    assert plain[REPLICA_FIELD.encode()] == b"a"
    assert {plain[name.encode()] for name in HTTP_ALONE} == {b"no-store", b"nosniff"}
    assert dict(request.answer_fields([(b"cache-control", b"no-cache")]))[b"cache-control"] == b"no-cache"
