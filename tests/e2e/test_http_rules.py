"""The server follows HTTP and browser rules on raw sockets: Host, origins, codings, HTTP/1.0, half-closed sockets."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import resource
import socket
import struct

import pytest
import torch

from tests.support.messages import JSON, PATIENCE, SAFETENSORS, ask, message, normal, problem, read_metrics, reply
from tests.support.messages import post as post_to
from tests.support.raw_http import answers, get, post, read_to_end, talk
from tests.support.servers import wait_for
from tests.support.sockets import connect, nothing_inside

GOOD = message({name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")})
ALONE = message({name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}, backend="reference")
CLOSE = "Connection: close"
KEEP = "Connection: keep-alive"


def one(received):
    """Return the only answer."""
    (answer,) = answers(received)
    return answer


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
    """The second head equals the first one plus its trailers: it has two hosts, though the first request was valid."""
    lines = "POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    with connect(server) as connection:
        connection.sendall(f"{lines}\r\n1\r\nx\r\n0\r\nHost: localhost\r\n\r\n".encode())
        first = http.client.HTTPResponse(connection)
        first.begin()
        assert (first.status, len(first.read()) > 0) == (404, True)
        connection.sendall(f"{lines}Host: localhost\r\n\r\n0\r\n\r\n".encode())
        problem(one(read_to_end(connection)), 400, "malformed_head")


def test_a_head_that_differs_from_the_last_one_is_read_anew(server):
    heads = [post("/attention", GOOD, SAFETENSORS, f"X-Priority: {n}") for n in (1, 1, 10, 2)]
    replies = answers(talk(server, b"".join(heads) + post("/attention", GOOD, SAFETENSORS, CLOSE)))
    assert [answer.status for answer in replies] == [200, 200, 422, 200, 200]


def test_a_request_of_http_1_0_has_one_host_at_most(server):
    assert one(talk(server, get("/health", version="1.0", host=""))).status == 200
    assert one(talk(server, get("/health", version="1.0"))).status == 200
    problem(one(talk(server, get("/health", version="1.0", host=HOSTS["two"]))), 400, "malformed_head")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "192.0.2.1"])
def test_a_name_that_leads_here_is_not_ours(server, host):
    """DNS rebinding makes a browser take this server for the page's origin. A server on loopback without keys answers
    only to loopback names."""
    before = read_metrics(server)["flashpoint_accepted_total"]
    fields = f"Origin: http://{host}", "Sec-Fetch-Site: same-origin", CLOSE
    for sent in (get("/info", *fields, host=f"Host: {host}"), get(f"http://{host}/info", *fields)):
        detail = problem(one(talk(server, sent)), 421, "host_not_allowed")["detail"]
        assert repr(host.partition(":")[0]) in detail
        assert "--allowed-hosts" in detail
    head = post("/attention", GOOD, SAFETENSORS, *fields).replace(b"Host: localhost", f"Host: {host}".encode())
    problem(one(talk(server, head)), 421, "host_not_allowed")
    refused = one(talk(server, get("/v2/models/attention", *fields, host=f"Host: {host}")))
    assert (refused.status, list(refused.json)) == (421, ["error"])
    assert read_metrics(server)["flashpoint_accepted_total"] == before


@pytest.mark.parametrize("host", ["localhost", "app.localhost:1", "127.3.2.1", "[::1]:8000", "LOCALHOST."])
def test_loopback_names_are_ours(server, host):
    assert one(talk(server, get("/info", CLOSE, host=f"Host: {host}"))).status == 200
    assert one(talk(server, get("http://localhost/info", CLOSE, host="Host: ignored.example"))).status == 200


@pytest.fixture(scope="module")
def named(start_server):
    """Start a server with keys that answers to some names and to pages of one origin."""
    return start_server(
        ready=False,
        api_keys="k",
        allowed_hosts="attention.example,*.pods.example",
        cors_origins="https://friend.example",
    )


def test_allowed_hosts_are_answered(named):
    for host, status in (("attention.example:80", 200), ("a.b.pods.example", 200), ("pods.example", 421), ("x.y", 421)):
        assert one(talk(named, get("/health", CLOSE, host=f"Host: {host}"))).status == status
    assert named.get("/health")[1]["live"]  # by address, as probes do


EVIL = ("Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors")


@pytest.mark.parametrize("fields", [EVIL, EVIL[:1], EVIL[1:], ("Sec-Fetch-Site: same-site",)])
def test_a_page_of_another_site_has_nothing_computed(server, fields):
    """A POST of text/plain needs no CORS preflight: the browser sends it and only hides the answer."""
    before = read_metrics(server)["flashpoint_accepted_total"]
    numbers = {"shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    infer = json.dumps({"inputs": [{"name": name, **numbers} for name in "qkv"]}).encode()
    path = "/v2/models/attention/infer"
    assert one(talk(server, post(path, infer, "text/plain", CLOSE))).status == 200
    refused = one(talk(server, post(path, infer, "text/plain", CLOSE, *fields)))
    assert refused.status == 403
    assert "--cors-origins" in refused.json["error"]
    problem(one(talk(server, post("/benchmark", b"{}", "text/plain", CLOSE, *fields))), 403, "cross_site")
    problem(one(talk(server, get("/metrics", CLOSE, *fields))), 403, "cross_site")
    assert read_metrics(server)["flashpoint_accepted_total"] == before + 1


def test_links_of_other_sites_lead_to_the_page_and_the_documentation(server):
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert [ask(server, path, **link).status for path in ("/", "/docs", "/info")] == [200, 200, 403]


def test_pages_of_allowed_origins_call(named):
    for origin, status in (("https://friend.example", 200), ("https://evil.example", 403)):
        answer = ask(named, "/health", origin=origin, sec_fetch_site="cross-site", host="attention.example")
        assert answer.status == status
        assert ("access-control-allow-origin" in answer.headers) == (status == 200)
    preflight = {"origin": "https://evil.example", "access_control_request_method": "POST"}
    problem(ask(named, "/attention", "OPTIONS", **preflight), 403, "cross_site")


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
        response.begin()  # at once: the connection may be reset after the answer
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


def test_http_1_0_is_kept_alive_where_it_asks(server):
    """The requests get JSON, an answer read directly into its buffer, an error, and a last answer."""
    requests = [get("/health", KEEP, version="1.0"), post("/attention", GOOD, SAFETENSORS, KEEP, version="1.0")]
    requests += [get("/nothing", KEEP, version="1.0"), get("/info", version="1.0")]
    replies = answers(talk(server, b"".join(requests)))
    assert [answer.status for answer in replies] == [200, 200, 404, 200]
    assert [answer.headers["connection"] for answer in replies] == ["keep-alive"] * 3 + ["close"]
    assert replies[1].body == post_to(server, "/attention", GOOD).body


@pytest.fixture(scope="module")
def job(server):
    """Return the address of a finished benchmark."""
    grid = {"shapes": [{"q_len": 16, "head_dim": 16}], "max_seconds": 0.01, "backends": ["torch"]}
    path = post_to(server, "/benchmark", json.dumps(grid).encode(), JSON).headers["location"]
    wait_for(lambda: ask(server, path).json["state"] == "done", lambda: "the benchmark goes on")
    return path


def test_a_stream_without_length_ends_with_its_connection_in_http_1_0(server, job):
    whole = ask(server, f"{job}/events").body
    for fields in ((), (KEEP,)):
        answer = one(talk(server, get(f"{job}/events", *fields, version="1.0")))
        assert "transfer-encoding" not in answer.headers
        assert (answer.headers["connection"], answer.body) == ("close", whole)


def test_half_a_connection_gets_its_answers(server, job):
    """The client shuts down its sending side after one or several requests, and perhaps half of one more."""
    large = message({name: normal(1, 8, 4096 if name == "q" else 4, 64, seed=1) for name in "qkv"})  # 8 MiB
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
    """The answer exceeds the kernel's buffers, so most of it is sent after the client has shut down sending."""
    large = message({name: torch.ones(1, 8, 16384 if name == "q" else 4, 64) for name in "qkv"})  # 32 MiB
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
    """The request is running, or waits in the queue, when the client shuts down its sending side."""
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
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # which checks that it is there
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        gated.wait_dropped(name)
    assert gated.server.wait_for_request(name)["code"] == "client_gone"
    assert not gated.begun(name)


def test_without_descriptors_the_log_says_that_connections_are_dropped(server):
    used = {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (max(used) + 1, before[1]))
    try:
        with contextlib.ExitStack() as held:
            for _ in range(max(used) + 1):  # all free descriptors and more, which wait to be accepted
                connection = held.enter_context(socket.socket())
                connection.settimeout(PATIENCE)
                connection.connect(("127.0.0.1", server.port))
            said = server.wait_for_line(lambda line: line["event"] == "connections are dropped")
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    assert said["limit"] == max(used) + 1
    wait_for(lambda: reached(server), lambda: "no connection is taken any more")


def reached(server):
    try:
        return server.get("/health")[0] == 200
    except (ConnectionError, json.JSONDecodeError):
        return False


def test_long_names_are_shortened_in_errors(server):
    long = "x" * 3000
    tensors = {name: normal(2, 3) for name in "qkv"}
    for body, where in ((message(tensors | {long: normal(1)}), long), (message(tensors, **{long: 1}), long),
                        (message(tensors, layout=long), "layout")):  # fmt: skip
        answer = post_to(server, "/attention", body)
        document = problem(answer, 422, "invalid_request")
        ((field, *_),) = (error["loc"] for error in document["errors"])
        assert field[:60] == where[:60]
        assert len(field) <= 200
        assert len(answer.body) < 1500
    problem(missing := ask(server, f"/{long}"), 404, "not_found")
    assert len(missing.body) < 1000
    inputs = [{"name": long, "shape": [1], "datatype": "FP32", "data": [1]}]
    refused = post_to(server, "/v2/models/attention/infer", json.dumps({"inputs": inputs}).encode(), JSON)
    assert refused.status == 422
    assert len(refused.body) < 1000
    refused = ask(server, f"/v2/models/{long}")
    assert (refused.status, len(refused.body) < 1000) == (404, True)


def test_health_in_one_answer(server):
    assert server.get("/health") == (200, {"status": "ok", "live": True, "ready": True, "reason": None})


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
