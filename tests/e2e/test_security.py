"""Keys, limits, heads and origins at a server of two processes, as those see it who mean it ill."""

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import re
import signal
import socket
import time

import pytest
import torch

from flashpoint_server.serving import open_to_all
from flashpoint_server.settings import Settings
from tests.support.messages import JSON, SAFETENSORS, Reply, message, normal, post, problem, reply
from tests.support.servers import wait_for

GOOD = message({name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")})
ORIGIN = "https://page.example"
KEYS = {  # by name; the key of alice is alice-s3cret
    "alice": {"rights": ["attention", "info", "benchmark"]},
    "bob": {"rights": ["benchmark"]},
    "looker": {"rights": ["info"]},
    "slow": {"rights": ["attention"], "requests_per_second": 0.01},
    "small": {"rights": ["attention"], "bytes_per_second": 1000},
    "cheap": {"rights": ["attention"], "flops_per_second": 1000},
    "single": {"rights": ["attention"], "concurrent": 1},
    "root": {"rights": ["admin", "benchmark", "info"]},
}


def key_of(name):
    return f"{name}-s3cret"


def bearer(name):
    return {"authorization": f"Bearer {key_of(name)}"}


def write(path, keys):
    lines = []
    for name, fields in keys.items():
        digest = hashlib.sha256(key_of(name).encode()).hexdigest()
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in ({"sha256": digest} | fields).items())]
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def keys_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(path, KEYS)
    return path


@pytest.fixture(scope="module")
def locked(start_server, keys_path):
    return start_server(
        workers=2, api_keys_file=keys_path, header_timeout=1, cors_origins=ORIGIN, log_level="debug",
        environment={"FLASHPOINT_API_KEYS": "environment-s3cret:info+metrics"}.items(),
    )  # fmt: skip


def ask(locked, method, path, **headers):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", locked.port, timeout=60)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return reply(connection.getresponse())


def words(answer):
    """What an error says; under /v2 it has a form of its own."""
    document = answer.json
    return answer.status, document.get("detail") or document["error"]


def test_a_refused_key_is_told_nothing(locked):
    """The same words on every path, whether the key is missing, wrong, of another scheme, or lacks another right."""
    unknown, forbidden = set(), set()
    for path in ("/attention", "/attention/grad", "/verify", "/benchmark", "/v2/models/attention/infer"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {key_of('alice')}"}):
            unknown.add(words(post(locked, path, GOOD, **headers)))
        forbidden.add(words(post(locked, path, GOOD, **bearer("looker"))))
    assert {status for status, _ in unknown} == {401}
    assert {status for status, _ in forbidden} == {403}
    assert (len(unknown), len(forbidden)) == (1, 1)
    assert post(locked, "/attention", GOOD, **bearer("alice")).status == 200
    for path in ("/health/live", "/health/ready", "/v2/health/ready"):
        assert ask(locked, "GET", path).status == 200


def limited(answer):
    problem(answer, 429, "key_limit")
    return int(answer.headers["retry-after"])


def test_requests_are_counted_over_all_processes(locked):
    """Ten connections at once reach both processes, and one request in all is let in."""
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: post(locked, "/attention", GOOD, **bearer("slow")), range(10)))
    assert sorted(answer.status for answer in answers) == [200] + [429] * 9
    assert all(90 <= limited(answer) <= 100 for answer in answers if answer.status == 429)


def test_bytes_and_flops_are_charged_before_the_body_is_read(locked):
    body = message({name: torch.zeros(1, 1, 100, 64) for name in "qkv"})  # 100 KiB in and out
    assert post(locked, "/attention", body, **bearer("small")).status == 200
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        head = f"POST /attention HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key_of('small')}\r\n"
        head += f"Content-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[:1000])  # and no more
        response = http.client.HTTPResponse(connection)
        response.begin()
        fields = {name.lower(): value for name, value in response.getheaders()}
        answer = Reply(response.status, fields, response.read1())
    assert 50 <= limited(answer) <= 110
    assert post(locked, "/attention", body, **bearer("cheap")).status == 200
    assert limited(post(locked, "/attention", body, **bearer("cheap"))) > 1000


def test_requests_at_once_are_counted_from_their_head(locked):
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        head = f"POST /attention HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key_of('single')}\r\n"
        connection.sendall(f"{head}Content-Type: {SAFETENSORS}\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode())
        connection.sendall(GOOD[:-1])
        wait_for(lambda: post(locked, "/attention", GOOD, **bearer("single")).status == 429, lambda: "never counted")
    wait_for(lambda: post(locked, "/attention", GOOD, **bearer("single")).status == 200, lambda: "counted for ever")


def test_a_key_is_named_in_logs_and_metrics(locked):
    answer = post(locked, "/attention", b"", x_request_id="named", **bearer("alice"))
    problem(answer, 400, "malformed_body")
    line = locked.wait_for_line(lambda line: line.get("request_id") == "named")
    assert (line["key"], line["code"]) == ("alice", "malformed_body")

    def exposed():
        return ask(locked, "GET", "/metrics", authorization="Bearer environment-s3cret").body.decode()

    assert 'flashpoint_key_requests_total{key="alice",reason="malformed_body"} 1.0' in exposed()
    wait_for(lambda: 'key="key-1"' in exposed(), exposed)  # counted once it has been answered
    text = exposed()
    assert set(re.findall(r'_key_requests_total{key="([^"]*)"', text)) <= {*KEYS, "key-1"}


def test_a_benchmark_is_its_keys_own_and_an_administrators(locked):
    asked = {"shapes": [{"q_len": 16, "head_dim": 16}], "max_seconds": 0.01, "backends": ["torch"]}
    started = post(locked, "/benchmark", json.dumps(asked).encode(), JSON, **bearer("alice"))
    assert started.status == 202, started.body
    path = started.headers["location"]
    for method, end in (("GET", ""), ("GET", "/events"), ("GET", "/plot.svg"), ("DELETE", "")):
        problem(ask(locked, method, path + end, **bearer("bob")), 404, "not_found")
    for name in ("alice", "root"):
        assert ask(locked, "GET", path, **bearer(name)).json["id"] == path.rpartition("/")[2]


def test_a_right_of_its_own_registers_shared_memory(locked):
    for name, status in (("alice", 403), ("looker", 403), ("root", 404)):  # 404: it is off here
        answer = post(
            locked, "/v2/systemsharedmemory/region/r/register", b'{"key": "k", "byte_size": 1}', **bearer(name)
        )
        assert answer.status == status


def test_only_pages_of_named_origins_may_call(locked):
    wanted = {"origin": ORIGIN, "access_control_request_method": "POST"}
    asked = ask(locked, "OPTIONS", "/attention", **wanted, access_control_request_headers="authorization,content-type")
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
    plain = post(locked, "/attention", GOOD, **bearer("alice"))
    answer = post(locked, "/attention", GOOD, origin=ORIGIN, **bearer("alice"))
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in plain.headers
    assert torch.equal(answer.tensors["o"], plain.tensors["o"])
    for method, path in (("OPTIONS", "/attention"), ("GET", "/health/live")):
        other = ask(locked, method, path, **wanted | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def closed(connection):
    """What is read until the locked has closed, however it does."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


HEAD = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /attention HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "one field": (HEAD + b"X: ", b"x" * 4096),
    "fields": (HEAD, b"X: " + b"x" * 4091 + b"\r\n"),
    "line": (b"GET /", b"x" * 4096),
    "blank lines": (b"", b"\r\n" * 2048),
    "chunk extension": (CHUNKED + b"1;x=", b"x" * 4096),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: " + b"x" * 4091 + b"\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_never_ends_is_cut_off_in_bounded_bytes(locked, what):
    begin, more = ENDLESS[what]
    sent = 0
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        connection.sendall(begin)
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                connection.sendall(more)
                sent += len(more)
        assert sent < 64 << 20  # the sockets' own buffers take some MiB
        closed(connection)
    assert post(locked, "/attention", GOOD, **bearer("alice")).status == 200


def test_a_large_head_is_taken_and_one_too_large_is_431(locked):
    for size, count, status in ((60_000, 1, 200), (110_000, 1, 431), (10, 120, 200), (10, 200, 431)):
        fields = b"".join(b"X-%d: %s\r\n" % (n, b"x" * size) for n in range(count))
        with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(HEAD + b"Connection: close\r\n" + fields + b"\r\n")
            found = closed(connection)
        assert found.startswith(b"HTTP/1.1 %d " % status), (size, count, found[:100])
        assert (b'"code": "head_too_large"' in found) == (status == 431)


SLOW = [b"", HEAD[:10], HEAD, b"\r\n", HEAD + b"\r\n" + HEAD, HEAD + b"Content-Length: 99\r\n\r\n"]


@pytest.mark.parametrize("begin", SLOW)
def test_a_slow_head_is_closed_in_bounded_time(locked, begin):
    """Slowloris: a byte now and then keeps no connection, whether it is of a head, a blank line or an unwanted body."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", locked.port), timeout=0.1) as connection:
        connection.sendall(begin)
        while time.monotonic() < began + 60:
            try:
                if not connection.recv(1 << 16):
                    break
            except TimeoutError:
                if begin:
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(b"\r\n" if begin == b"\r\n" else b"x")
            except ConnectionError:
                break
        else:
            pytest.fail("it is still open")


def test_keys_are_read_again_and_a_wrong_file_changes_nothing(locked, keys_path):
    def reloaded(event):
        seen = len([line for line in locked.lines if line["event"] == event])
        locked.process.send_signal(signal.SIGHUP)
        wait_for(
            lambda: len([line for line in locked.lines if line["event"] == event]) == seen + 2,
            lambda: locked.lines[-5:],
        )

    def statuses(name):
        return {post(locked, "/attention", GOOD, **bearer(name)).status for _ in range(8)}

    assert statuses("carol") == {401}
    write(keys_path, {**KEYS, "carol": {"rights": ["attention"]}, "alice": {"rights": ["info"]}})
    reloaded("keys loaded")
    assert (statuses("carol"), statuses("alice")) == ({200}, {403})
    assert statuses("slow") == {429}  # what it has used is not forgotten
    keys_path.write_text("[carol]")
    reloaded("keys kept")
    assert (statuses("carol"), statuses("alice")) == ({200}, {403})


def test_secrets_are_in_no_log(locked):
    """The last here: all that was asked above, and keys where they do not belong."""
    post(locked, f"/attention?key={key_of('alice')}", GOOD)
    post(locked, "/attention", GOOD, authorization=f"Bearer{key_of('alice')}")
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {key_of('alice')}\r\nBad\x01: \r\n\r\n".encode())
        closed(connection)
    locked.wait_for_line(lambda line: line["event"] == "Invalid HTTP request received.")
    assert len(locked.lines) > 50
    log = json.dumps(locked.lines) + json.dumps(locked.noise)
    digests = [hashlib.sha256(key_of(name).encode()).hexdigest() for name in KEYS]
    assert [secret for secret in ("s3cret", *digests) if secret in log] == []


def test_what_is_open_to_all_is_said():
    assert open_to_all(Settings(), "0.0.0.0")
    assert open_to_all(Settings(), "192.0.2.1")
    assert not open_to_all(Settings(), "127.0.0.1")
    assert not open_to_all(Settings(), "::1")
    assert not open_to_all(Settings(api_keys="k"), "0.0.0.0")
    assert Settings().host == "127.0.0.1"


def test_without_origins_no_page_of_another_may_call(server):
    for method, path in (("OPTIONS", "/attention"), ("GET", "/health/live")):
        answer = ask(server, method, path, origin=ORIGIN, access_control_request_method="POST")
        assert not [name for name in answer.headers if name.startswith("access-control")]
