"""A server with two HTTP processes resists hostile requests: wrong keys, exceeded limits, bad heads, other origins."""

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import re
import signal
import socket

import numpy as np
import pytest
import torch

import flashpoint
from tests.support.messages import JSON, SAFETENSORS, Reply, message, normal, post, problem, reply
from tests.support.servers import wait_for

GOOD = message({name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")})


Q = np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float32)


ORIGIN = "https://page.example"


# The settings of each API key by its name; the key of alice is alice-s3cret. A key whose limit a test exhausts is used
# by no other test. Limited rates are so low that they allow no second request during a test, however slow it is.
KEYS = {
    "alice": {"rights": ["attention", "info", "benchmark"]},
    "bob": {"rights": ["benchmark"]},
    "looker": {"rights": ["info"]},
    "named": {"rights": ["attention"]},
    "demoted": {"rights": ["attention"]},
    "slow": {"rights": ["attention"], "requests_per_second": 1e-5},
    "spent": {"rights": ["attention"], "requests_per_second": 1e-5},
    "small": {"rights": ["attention"], "bytes_per_second": 1},
    "cheap": {"rights": ["attention"], "flops_per_second": 1},
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


def logged_secrets(server):
    """Return the parts of keys, and the key hashes, that occur in the server's log."""
    log = json.dumps(server.lines) + json.dumps(server.noise)
    digests = [hashlib.sha256(key_of(name).encode()).hexdigest() for name in KEYS]
    return [secret for secret in ("s3cret", *digests) if secret in log]


@pytest.fixture(scope="module")
def locked(start_server, keys_path):
    """Yield a server with API keys and timeouts of an hour, so that none expires on a slow machine."""
    server = start_server(
        workers=2, api_keys_file=keys_path, header_timeout=3600, body_timeout=3600, body_limit=1 << 20,
        cors_origins=ORIGIN, log_level="debug",
        environment={"FLASHPOINT_API_KEYS": "environment-s3cret:info+metrics"}.items(),
    )  # fmt: skip
    yield server
    assert logged_secrets(server) == []  # no test leaves a secret in the log


def ask(locked, method, path, **headers):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", locked.port, timeout=60)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return reply(connection.getresponse())


def words(answer):
    """Return (status, detail) of an error answer. The Open Inference Protocol (/v2) has the detail in `error`."""
    document = answer.json
    return answer.status, document.get("detail") or document["error"]


def test_a_refused_key_is_told_nothing(locked):
    """On each path, a missing key, a wrong key and another scheme get the same 401; a missing permission gets a 403."""
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
    """The rate limit admits only one of ten concurrent requests, although these reach both HTTP processes."""
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: post(locked, "/attention", GOOD, **bearer("slow")), range(10)))
    assert sorted(answer.status for answer in answers) == [200] + [429] * 9
    for answer in answers:
        if answer.status == 429:
            problem(answer, 429, "key_limit")
    assert 90_000 <= limited(post(locked, "/attention", GOOD, **bearer("slow"))) <= 100_000


def test_bytes_and_flops_are_charged_before_the_body_is_read(locked):
    body = message({name: torch.zeros(1, 1, 100, 64) for name in "qkv"})  # 100 KiB: the request and its answer together
    assert post(locked, "/attention", body, **bearer("small")).status == 200
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        head = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key_of('small')}\r\n"
        head += f"Content-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[:1000])  # the client sends no more
        response = http.client.HTTPResponse(connection)
        response.begin()
        fields = {name.lower(): value for name, value in response.getheaders()}
        answer = Reply(response.status, fields, response.read1())
    assert 90_000 <= limited(answer) <= 102_400
    assert post(locked, "/attention", body, **bearer("cheap")).status == 200
    assert limited(post(locked, "/attention", body, **bearer("cheap"))) > 1000


def test_requests_at_once_are_counted_from_their_head(locked):
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        head = f"POST /attention HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key_of('single')}\r\n"
        head += f"Content-Type: {SAFETENSORS}\r\nContent-Length: {len(GOOD)}\r\n\r\n"
        connection.sendall(head.encode() + GOOD[:-1])
        info = lambda: ask(locked, "GET", "/info", **bearer("looker")).json  # noqa: E731  # either process may answer
        wait_for(lambda: info()["load"]["requests"] == 1, lambda: "it is not let in")
        assert limited(post(locked, "/attention", GOOD, **bearer("single"))) == 1
    wait_for(lambda: post(locked, "/attention", GOOD, **bearer("single")).status == 200, lambda: "counted for ever")


def test_a_key_is_named_in_logs_and_metrics(locked):
    answer = post(locked, "/attention", b"", x_request_id="named", **bearer("named"))
    problem(answer, 400, "malformed_body")
    line = locked.wait_for_line(lambda line: line.get("request_id") == "named")
    assert (line["key"], line["code"]) == ("named", "malformed_body")

    def exposed():
        return ask(locked, "GET", "/metrics", authorization="Bearer environment-s3cret").body.decode()

    # Wait, because the server may count a request after it has sent the answer.
    wait_for(lambda: 'flashpoint_key_requests_total{key="named",reason="malformed_body"} 1.0' in exposed(), exposed)
    wait_for(lambda: 'key="key-1"' in exposed(), exposed)
    text = exposed()
    assert set(re.findall(r'_key_requests_total{key="([^"]*)"', text)) <= {*KEYS, "carol", "key-1"}


def test_a_benchmark_is_its_keys_own_and_an_administrators(locked):
    grid = {"shapes": [{"q_len": 16, "head_dim": 16}], "max_seconds": 0.01, "backends": ["cpu"]}
    started = post(locked, "/benchmark", json.dumps(grid).encode(), JSON, **bearer("alice"))
    assert started.status == 202, started.body
    path = started.headers["location"]
    for method, end in (("GET", ""), ("GET", "/events"), ("GET", "/plot.svg"), ("DELETE", "")):
        problem(ask(locked, method, path + end, **bearer("bob")), 404, "not_found")
    for name in ("alice", "root"):
        assert ask(locked, "GET", path, **bearer(name)).json["id"] == path.rpartition("/")[2]


def test_a_right_of_its_own_registers_shared_memory(locked):
    for name, status in (("alice", 403), ("looker", 403), ("root", 404)):  # 404: shared memory is disabled here
        answer = post(
            locked, "/v2/systemsharedmemory/region/r/register", b'{"key": "k", "byte_size": 1}', **bearer(name)
        )
        assert answer.status == status


def test_only_pages_of_named_origins_may_call(locked):
    wanted = {"origin": ORIGIN, "access_control_request_method": "POST"}
    preflight = ask(
        locked, "OPTIONS", "/attention", **wanted, access_control_request_headers="authorization,content-type"
    )
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, ORIGIN)
    plain = post(locked, "/attention", GOOD, **bearer("alice"))
    answer = post(locked, "/attention", GOOD, origin=ORIGIN, **bearer("alice"))
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in plain.headers
    assert torch.equal(answer.tensors["o"], plain.tensors["o"])
    for method, path in (("OPTIONS", "/attention"), ("GET", "/health/live")):
        other = ask(locked, method, path, **wanted | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def closed(connection):
    """Return the bytes that are received before the server closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


HEAD = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"


CHUNKED = b"POST /attention HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


ENDLESS = {
    "one field": (HEAD + b"X: ", b"x" * 4096),
    "fields": (HEAD, b"X: " + b"x" * 4091 + b"\r\n"),
    "line": (b"GET /", b"x" * 4096),
    "blank lines": (b"", b"\r\n" * 2048),
    "chunk extension": (CHUNKED + b"1;x=", b"x" * 4096),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: " + b"x" * 4091 + b"\r\n"),
}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=() if w in ("fields", "trailers") else pytest.mark.slow) for w in ENDLESS]
)
def test_what_never_ends_is_cut_off_in_bounded_bytes(locked, what):
    begin, more = ENDLESS[what]
    sent = 0
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        connection.sendall(begin)
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                connection.sendall(more)
                sent += len(more)
        assert sent < 64 << 20  # far above the limits, because socket buffers accept some MiB
        closed(connection)
    assert post(locked, "/attention", GOOD, **bearer("alice")).status == 200


def test_a_large_head_is_taken_and_one_too_large_is_431(locked):
    for size, count, status in ((60_000, 1, 200), (110_000, 1, 431), (10, 120, 200), (10, 200, 431)):
        fields = b"".join(b"X-%d: %s\r\n" % (n, b"x" * size) for n in range(count))
        with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(HEAD + b"Connection: close\r\n" + fields + b"\r\n")
            received = closed(connection)
        assert received.startswith(b"HTTP/1.1 %d " % status), (size, count, received[:100])
        assert (b'"code": "head_too_large"' in received) == (status == 431)


def test_keys_are_read_again_and_a_wrong_file_changes_nothing(locked, keys_path):
    """Both HTTP processes get the keys when the file changes, and at SIGHUP; an invalid file has no effect."""

    def reread(event, change, lines=2):
        seen = len([line for line in locked.lines if line["event"] == event])
        change()
        wait_for(
            lambda: len([line for line in locked.lines if line["event"] == event]) >= seen + lines,
            lambda: locked.lines[-5:],
        )

    def put(text):
        """Replace the key file atomically, as an editor or Kubernetes does, so that no process reads a part of it."""
        new = keys_path.with_suffix(".new")
        new.write_text(text) if isinstance(text, str) else write(new, text)
        new.replace(keys_path)

    def statuses(name):
        return {post(locked, "/attention", GOOD, **bearer(name)).status for _ in range(8)}

    assert (statuses("carol"), statuses("demoted")) == ({401}, {200})
    assert statuses("spent") == {200, 429}
    reread("keys loaded", lambda: put({**KEYS, "carol": {"rights": ["attention"]}, "demoted": {"rights": ["info"]}}))
    assert (statuses("carol"), statuses("demoted")) == ({200}, {403})
    assert statuses("spent") == {429}  # the key's usage is kept
    reread("keys kept", lambda: put("[carol]"), 1)
    assert (statuses("carol"), statuses("demoted")) == ({200}, {403})
    reread("keys kept", lambda: locked.process.send_signal(signal.SIGHUP), 1)


def test_secrets_are_in_no_log(locked):
    """The log contains no API key, even if a request has it in its path, its query or a malformed header."""
    assert post(locked, "/attention", GOOD, **bearer("alice")).status == 200
    assert post(locked, "/attention", GOOD, **bearer("looker")).status == 403
    post(locked, f"/attention?key={key_of('alice')}", GOOD)
    post(locked, "/attention", GOOD, authorization=f"Bearer{key_of('alice')}")
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {key_of('alice')}\r\nBad\x01: \r\n\r\n".encode())
        closed(connection)
    locked.wait_for_line(lambda line: line["event"] == "malformed request" and line["reason"])
    for number, path in enumerate(
        ("/{}", "/benchmark/{}", "/attention/{}/events", "/static/{}?{}", "/v2/models/{}/ready")
    ):
        answer = ask(locked, "GET", path.replace("{}", key_of("alice")), x_request_id=f"misplaced-{number}")
        assert answer.status in (401, 404)
        route = locked.wait_for_request(f"misplaced-{number}")["route"]
        assert route == path.partition("?")[0].replace("{}", "*")
    assert logged_secrets(locked) == []


def test_the_client_sends_its_key_and_reports_a_missing_or_wrong_one(locked):
    with flashpoint.Client(locked.url, api_key=key_of("alice")) as client:
        assert client.attention(Q, Q, Q).shape == Q.shape
        assert client.info()["backends"]
    for wrong in (None, "guess"):
        with flashpoint.Client(locked.url, api_key=wrong) as client:
            with pytest.raises(flashpoint.AuthenticationError) as info:
                client.attention(Q, Q, Q)
            assert info.value.status == 401
            assert client.live()


def test_the_client_reads_the_refusal_of_a_body_that_it_still_sends(locked):
    big = np.zeros((1, 8, 8192, 64), np.float32)
    with flashpoint.Client(locked.url, api_key=key_of("alice")) as client:
        with pytest.raises(flashpoint.TooLargeError) as info:
            client.attention(big, big, big)
        assert (info.value.status, bool(info.value.request_id)) == (413, True)
        assert client.attention(Q, Q, Q).shape == Q.shape


def test_with_keys_a_server_answers_to_every_host(locked):
    assert ask(locked, "GET", "/health", host="any.example").status == 200


def test_without_origins_no_page_of_another_may_call(server):
    for method, path in (("OPTIONS", "/attention"), ("GET", "/health/live")):
        answer = ask(server, method, path, origin=ORIGIN, access_control_request_method="POST")
        assert not [name for name in answer.headers if name.startswith("access-control")]
