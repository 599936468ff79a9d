"""The server limits the size and the time of a body, and drops an answer that its client does not read."""

import concurrent.futures
import contextlib
import http.client
import itertools
import os
import select
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import httpx
import torch

from tests.support.constant_answers import constant, given_up, unread, values_of, wide
from tests.support.messages import (
    JSON,
    PATIENCE,
    SAFETENSORS,
    Reply,
    message,
    message_head,
    normal,
    post,
    problem,
    reply,
    small,
)
from tests.support.servers import wait_for
from tests.support.sockets import connect, nothing_inside

MIB = 1 << 20


SMALL = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}


GOOD = small()


KEY = {"authorization": "Bearer all"}


def test_a_body_over_the_limit_413_by_its_length(strict):
    problem(post(strict, "/attention", bytes(MIB + 1), **KEY), 413, "body_too_large")
    problem(post(strict, "/attention", b" " * 65537, JSON, **KEY), 413, "body_too_large")
    fits = {name: normal(1, 1, 400, 128) for name in "qkv"}
    assert post(strict, "/attention", message(fits), **KEY).status == 200


def test_a_body_over_the_limit_413_while_it_streams(strict):
    name = f"endless-{os.urandom(4).hex()}"
    endless = itertools.repeat(b" " * 4096, 1024)  # 4 MiB; the server must stop reading at its limit
    problem(post(strict, "/attention", endless, JSON, x_request_id=name, **KEY), 413, "body_too_large")
    assert strict.wait_for_request(name)["bytes_in"] < 5 * MIB
    promised = message_head({"q": {"dtype": "U8", "shape": [2 * MIB], "data_offsets": [0, 2 * MIB]}})
    problem(post(strict, "/attention", iter([promised]), **KEY), 413, "body_too_large")


def test_a_body_that_comes_too_slowly_408(strict):
    start = (
        f"POST /attention HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\nContent-Type: {SAFETENSORS}\r\n"
    )
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(strict)) for _ in range(3)]
        for connection, sent in zip(connections, (b"", GOOD[:5], GOOD[:-1]), strict=True):
            connection.sendall(start.encode() + f"Content-Length: {len(GOOD)}\r\n\r\n".encode() + sent)
        for connection in connections:
            response = http.client.HTTPResponse(connection)
            response.begin()
            problem(reply(response), 408, "body_timeout")


def test_a_trickle_is_too_slow_even_without_a_pause(strict):
    """A body that arrives in single bytes gets 408 for its low rate, although no pause exceeds the timeout."""
    with connect(strict) as connection:
        connection.sendall(
            f"POST /attention HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer all\r\nContent-Type: {JSON}\r\n"
            "Content-Length: 60000\r\n\r\n".encode()
        )
        for _ in range(2400):  # at most 10 bytes a second; the server requires 1000
            connection.sendall(b" ")
            if select.select([connection], [], [], 0.1)[0]:
                break
        else:
            pytest.fail("the server accepts the trickle")
        response = http.client.HTTPResponse(connection)
        response.begin()
        problem(reply(response), 408, "body_timeout")


@pytest.mark.parametrize("path", ["/attention", "/verify", "/benchmark", "/v2/models/attention/infer"])
def test_a_client_that_vanishes_in_its_body_leaves_the_server_serving(server, path):
    """If a client leaves before it has sent its body, the log has a line with 499, and the server serves on."""
    name = f"vanished{path}-{os.urandom(4).hex()}"
    with connect(server) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\nContent-Type: {JSON}\r\n"
            'Content-Length: 1000\r\n\r\n{"shapes"'.encode()
        )
    line = server.wait_for_request(name)
    assert (line["status"], line["code"]) == (499, "client_gone")
    assert post(server, "/attention", GOOD).status == 200


def by_http_client(url, body, headers):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("POST", "/attention", body, {**headers, "Connection": "close"})
        return reply(connection.getresponse())


def by_urllib(url, body, headers):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{url}/attention", body, headers), timeout=PATIENCE)
    with caught.value as error:
        return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


def by_httpx(url, body, headers):
    answer = httpx.post(f"{url}/attention", content=body, headers=headers, timeout=PATIENCE)
    return Reply(answer.status_code, dict(answer.headers), answer.content)


def by_curl(url, body, headers):
    flags = [flag for name, value in headers.items() for flag in ("-H", f"{name}: {value}")]
    command = ["curl", "-sS", "-i", "--data-binary", "@-", *flags, f"{url}/attention"]
    out = subprocess.run(command, input=body, capture_output=True, timeout=PATIENCE, check=True).stdout
    while out.startswith(b"HTTP/1.1 100"):
        out = out.partition(b"\r\n\r\n")[2]
    top, _, text = out.partition(b"\r\n\r\n")
    status, *fields = top.decode().split("\r\n")
    return Reply(int(status.split()[1]), {k.lower(): v.strip() for k, _, v in (f.partition(":") for f in fields)}, text)


@pytest.mark.parametrize(
    "client",
    [by_http_client, by_curl, *(pytest.param(by, marks=pytest.mark.slow) for by in (by_urllib, by_httpx))],
)
@pytest.mark.parametrize(
    ("body", "key", "status", "code"),
    [
        (bytes(24 * MIB), "all", 413, "body_too_large"),
        pytest.param(bytes(24 * MIB), "none", 401, "unauthorized", marks=pytest.mark.slow),
        (message({"q": SMALL["q"], "x": torch.zeros(150_000)}), "all", 422, "invalid_request"),
    ],
    ids=["too large", "no key", "invalid head"],
)
def test_an_early_refusal_is_read_by_every_client(strict, client, body, key, status, code):
    headers = {"Content-Type": SAFETENSORS, "Authorization": f"Bearer {key}"}
    problem(client(strict.url, body, headers), status, code)


@pytest.mark.parametrize(("key", "statuses"), [("none", [401]), ("all", [100, 200])])
def test_expect_100_continue_is_answered_before_the_body_is_sent(strict, key, statuses):
    """With `Expect: 100-continue`, a request with a wrong key gets 401 at once; a valid one gets 100 Continue first."""
    with connect(strict) as connection:
        connection.sendall(
            f"POST /attention HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: {SAFETENSORS}\r\nContent-Length: {len(GOOD)}\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        results = []
        with connection.makefile("rb") as lines:
            while len(results) < len(statuses):
                results.append(int(lines.readline().split()[1]))
                if results[-1] == 100:
                    assert lines.readline() == b"\r\n"
                    connection.sendall(GOOD)
            fields = b"".join(iter(lines.readline, b"\r\n"))
        assert results == statuses
        # After a 401 instead of 100, a client may send the body or not, so the server must close the connection.
        assert (b"connection: close" in fields) == (statuses == [401])


def test_a_deadline_that_passes_while_the_body_comes_is_504(server):
    with connect(server) as connection:
        connection.sendall(
            f"POST /attention HTTP/1.1\r\nHost: localhost\r\nX-Timeout-Ms: 50\r\nContent-Type: {SAFETENSORS}\r\n"
            f"Content-Length: {len(GOOD)}\r\n\r\n".encode()
            + GOOD[:-8]
        )
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 504


BODY = message(
    {name: torch.ones(1, 1, 1 << 14, 4) for name in "qkv"} | {"kv_lengths": torch.ones(1, dtype=torch.int64)}
)


HEAD = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\n".encode()


@contextlib.contextmanager
def stopped(server):
    """Stop the server's HTTP process inside the block, and continue it after the body timeout (2 s) has passed."""
    os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        yield
    finally:
        time.sleep(max(0.0, began + 2.5 - time.monotonic()))
        os.kill(server.pid, signal.SIGCONT)


def status_of(connection):
    with connection.makefile("rb") as file:
        return file.readline().split()[1]


@pytest.mark.slow
def test_a_body_that_arrived_while_the_server_was_stopped(gated):
    """A body that arrived while the server was stopped is not late, with a Content-Length and with chunks."""
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    framings = {b"Content-Length: %d\r\n\r\n" % len(BODY): BODY, b"Transfer-Encoding: chunked\r\n\r\n": chunked}
    for framing, end in framings.items():
        with connect(gated.server) as connection:
            connection.sendall(HEAD + framing + end[: 1 << 10])
            wait_for(gated.inside, lambda: "it is not inside")
            with stopped(gated.server):
                connection.sendall(end[1 << 10 : 1 << 16])
            connection.sendall(end[1 << 16 :])
            assert status_of(connection) == b"200"
        nothing_inside(gated.server)


@pytest.mark.slow
def test_an_answer_that_nobody_takes_is_dropped_after_a_while(gated):
    with unread(gated.server, 2, "untaken"):
        given_up(gated.server, "untaken")
        nothing_inside(gated.server)
    assert post(gated.server, "/attention", GOOD).status == 200


@pytest.mark.slow
def test_an_answer_given_up_is_never_another_requests(gated):
    """Slow clients read nothing until the server drops their answers, while other requests reuse memory.

    The bytes that these clients read afterwards belong to their own answers only.
    """
    server, over = gated.server, threading.Event()
    connections = {f"slow-{value}": (value, unread(server, value, f"slow-{value}")) for value in range(1, 5)}

    def reuse():
        while not over.is_set():
            # The server may drop this answer, too.
            with contextlib.suppress(http.client.HTTPException, ConnectionError):
                post(server, "/attention", wide(-1, 1 << 12))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reusing = pool.submit(reuse)
        try:
            for name in connections:
                given_up(server, name)
        finally:
            over.set()
        reusing.result()
    for value, connection in connections.values():
        received = bytearray()
        with connection, contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 20):
                received += piece
        answer = bytes(received).split(b"\r\n\r\n", 1)[1]
        start = 8 + int.from_bytes(answer[:8], "little")
        whole = answer[start : start + (len(answer) - start) // 4 * 4]
        assert whole
        assert set(torch.frombuffer(bytearray(whole), dtype=torch.float32).tolist()) == {float(value)}


def test_a_request_behind_a_direct_body_may_close_with_bytes_behind_it(server):
    body = constant(4, 1 << 10)
    request = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\n"
    request += f"Content-Length: {len(body)}\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(request.encode() + body)
        with connection.makefile("rb") as file:
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\nGET /x")
            assert b"HTTP/1.1 200 OK" in file.read()


@pytest.mark.parametrize("expect", [True, False], ids=["100-continue", "at-once"])
def test_a_refusal_from_the_head_comes_before_the_body(server, expect):
    """An invalid safetensors head gets 422 before the tensors arrive.

    With `Expect: 100-continue`, the server asks for the body, and refuses it after the safetensors head.
    """
    bad = message({"q": torch.zeros(2, 1, 4096, 64), "k": torch.zeros(2, 1, 8, 32), "v": torch.zeros(2, 1, 8, 64)})
    head = bad[: 8 + int.from_bytes(bad[:8], "little")]
    with connect(server) as connection:
        lines = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\n"
        lines += f"Content-Length: {len(bad)}\r\n"
        if expect:
            lines += "Expect: 100-continue\r\n"
        connection.sendall(f"{lines}\r\n".encode() + (b"" if expect else head))
        if expect:
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 422 ")


def test_two_requests_on_one_connection_at_once(server):
    """Two pipelined requests, sent at once, are both answered."""
    body = constant(4, 1 << 10)
    request = (
        f"POST /attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n"
    )
    with connect(server) as connection:
        connection.sendall((f"{request}\r\n".encode() + body) + f"{request}Connection: close\r\n\r\n".encode() + body)
        with connection.makefile("rb") as file:
            answers = file.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    first, second = answers.split(b"HTTP/1.1 200 OK")[1:]
    assert values_of(first.split(b"\r\n\r\n", 1)[1]) == values_of(second.split(b"\r\n\r\n", 1)[1]) == {4.0}
