"""Every row of the contract's error table holds over a real socket, and malformed bodies do not stop the server."""

import contextlib
import http.client
import itertools
import json
import os
import select
import struct
import subprocess
import urllib.error
import urllib.request

import httpx
import pytest
import torch

from tests.support.messages import (
    JSON,
    PATIENCE,
    PROBLEM,
    SAFETENSORS,
    Reply,
    ask,
    message,
    message_head,
    normal,
    post,
    problem,
    reply,
)
from tests.support.servers import wait_for
from tests.support.sockets import connect

MIB = 1 << 20
SMALL = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}
GOOD = message(SMALL)
HEADS = {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * i, 24 * i + 24]} for i, name in enumerate("qkv")}
DATA = bytes(72)


@pytest.fixture(scope="module")
def strict(start_server):
    """Start a server with keys and small limits."""
    return start_server(
        api_keys="all,looker:info,prover:benchmark+verify",
        body_limit=MIB,
        json_limit=65536,
        sequence_limit=8,
        head_limit=4096,
        body_timeout=1,
        body_rate=1000,
        benchmark_jobs=2,
    )


def head(**changes):
    return message_head({**HEADS, **changes})


MALFORMED = {
    "empty": b"",
    "7 bytes": b"1234567",
    "truncated head": GOOD[:40],
    "truncated data": GOOD[:-1],
    "bytes behind the end": GOOD + b"x",
    "overlapping offsets": head(k={"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}) + DATA,
    "a hole": head(v={"dtype": "F32", "shape": [2, 3], "data_offsets": [52, 76]}) + DATA + bytes(4),
    "offsets beyond the data": head(v={"dtype": "F32", "shape": [2, 3], "data_offsets": [48, 1 << 62]}) + DATA,
    "header length of 2^63": struct.pack("<Q", 1 << 63) + DATA,
    "header length of 2^64-1": b"\xff" * 8 + DATA,
    "dtype lies about the size": head(q={"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 24]}) + DATA,
    "unknown dtype": head(q={"dtype": "F31", "shape": [2, 3], "data_offsets": [0, 24]}) + DATA,
    "negative shape": head(q={"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}) + DATA,
    "product overflow": head(q={"dtype": "F32", "shape": [1 << 33, 1 << 33, 0], "data_offsets": [0, 0]}) + DATA,
    "shape of floats": head(q={"dtype": "F32", "shape": [2.0, 3], "data_offsets": [0, 24]}) + DATA,
    "head is a list": struct.pack("<Q", 2) + b"[]",
    "head is not UTF-8": struct.pack("<Q", 4) + b'{"\xff"',
    "metadata of numbers": message_head(HEADS, {"causal": 1}) + DATA,
    "deep head": struct.pack("<Q", 200_000) + b'{"q":' + b"[" * 199_995,
}
MALFORMED_JSON = {
    "empty": b"",
    "not JSON": b"{",
    "a list": b"[1]",
    "NaN literal": b'{"q": [[NaN]], "k": [[1]], "v": [[1]]}',
    "a key twice": b'{"q": [[1]], "q": [[1]], "k": [[1]], "v": [[1]]}',
    "deep": b'{"q": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "not UTF-8": b'{"q": "\xff"}',
}


@pytest.mark.parametrize("path", ["/attention", "/attention/grad"])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_400_and_the_server_goes_on(server, path, name):
    problem(post(server, path, MALFORMED[name]), 400, "malformed_body")
    assert post(server, "/attention", GOOD).status == 200


@pytest.mark.parametrize("name", MALFORMED_JSON)
def test_malformed_json_is_400_and_the_server_goes_on(server, name):
    problem(post(server, "/attention", MALFORMED_JSON[name], JSON), 400, "malformed_body")
    assert post(server, "/attention", GOOD).status == 200


@pytest.mark.parametrize("change", [-1, 1], ids=["too short", "too long"])
def test_a_chunked_body_of_another_size_than_its_head_says_is_400(server, change):
    body = GOOD[:change] if change < 0 else GOOD + b"x"
    problem(post(server, "/attention", iter([body[:10], body[10:100], body[100:]])), 400, "malformed_body")


F64 = {name: t.double() for name, t in SMALL.items()}
INVALID = {
    "k missing": (message({n: SMALL[n] for n in "qv"}), {"k"}),
    "misspelt option": (message(SMALL, casual=True), {"casual"}),
    "misspelt tensor": (message({**SMALL, "mask": SMALL["q"]}), {"mask"}),
    "option of another type": (message(SMALL, causal=1), {"causal"}),
    "word that is no JSON": (message(SMALL, causal="yes"), {"causal"}),
    "window of three": (message(SMALL, window=[1, 2, 3]), {"window"}),
    "infinite scale": (message(SMALL, scale="1e999"), {"scale"}),
    "dropout of 1": (message(SMALL, dropout_p=1), {"dropout_p"}),
    "integer q": (message({n: torch.ones(2, 3, dtype=torch.int32) for n in "qkv"}), {"q"}),
    "dtypes differ": (message({**SMALL, "v": SMALL["v"].half()}), {"v"}),
    "a dtype that is not served": (message({**SMALL, "attn_mask": torch.ones(2, 2, dtype=torch.uint8)}), {"attn_mask"}),
    "head dimensions differ": (message({**SMALL, "k": normal(2, 4)}), {"k"}),
    "ranks differ": (message({**SMALL, "k": normal(1, 2, 3)}), {"k"}),
    "mask does not broadcast": (message({**SMALL, "attn_mask": normal(3, 2)}), {"attn_mask"}),
    "no such backend": (message(SMALL, backend="magic"), {"backend"}),
    "triton without a GPU": (message(SMALL, backend="triton"), {"backend"}),
    "what torch cannot do": (message(F64, backend="torch"), {"q"}),
    "float64 on tiled": (message(F64, backend="tiled"), {"q"}),
    "head dimension of 600": (message({n: normal(2, 600) for n in "qkv"}, backend="tiled"), {"q"}),
    "lengths beyond the tensor": (message({**SMALL, "kv_lengths": torch.tensor([3])}), {"kv_lengths"}),
    "negative lengths": (message({**SMALL, "q_lengths": torch.tensor([-1])}), {"q_lengths"}),
    "several at once": (message(SMALL, causal=1, layout="sbhd"), {"causal", "layout"}),
    "cu_seqlens that fall": (
        message(
            {n: normal(4, 1, 8) for n in "qkv"}
            | {"cu_seqlens_q": torch.tensor([0, 3, 2, 4]), "cu_seqlens_k": torch.tensor([0, 1, 2, 4])},
            layout="thd",
        ),
        {"cu_seqlens_q"},
    ),
}
INVALID_JSON = {
    "ragged": ({"q": [[1, 2], [3]]}, "q"),
    "words": ({"q": [["one", 2]]}, "q"),
    "too large for its dtype": ({"q": [[1e39, 2]]}, "q"),
    "dtype": ({"dtype": "float8"}, "dtype"),
    "flat data of another size": ({"q": {"shape": [2, 2], "data": [1]}}, "q"),
    "unknown": ({"mask": [1]}, "mask"),
    "sizes that Python does not spell": ({"q": {"shape": [10**4000 - 1, 10**4000 - 1], "data": []}}, "q"),
    "lists within lists": ({"window": json.loads("[" * 900 + "]" * 900)}, "window"),
    "no name": ({"": 1}, "request"),
}
INVALID_HEADERS = {"x_timeout_ms": ["0", "-1", "1.5", "soon"], "x_priority": ["10", "-1", "high", ""]}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_not_valid_is_422_and_names_each_field(server, name):
    body, fields = INVALID[name]
    document = problem(post(server, "/attention", body), 422, "invalid_request")
    assert {error["loc"][0] for error in document["errors"]} == fields
    assert all(error["msg"] for error in document["errors"])


@pytest.mark.parametrize("name", INVALID_JSON)
def test_invalid_json_fields_are_422(server, name):
    changes, field = INVALID_JSON[name]
    good = {"q": [[1, 2]], "k": [[1, 2]], "v": [[1, 2]]}
    document = problem(
        post(server, "/attention", json.dumps({**good, **changes}).encode(), JSON), 422, "invalid_request"
    )
    assert [error["loc"] for error in document["errors"]] == [[field]]


@pytest.mark.parametrize(("header", "value"), [(h, v) for h, values in INVALID_HEADERS.items() for v in values])
def test_invalid_headers_are_422(server, header, value):
    document = problem(post(server, "/attention", GOOD, **{header: value}), 422, "invalid_request")
    assert document["errors"][0]["loc"][0].lower() == header.replace("_", "-")


def test_invalid_gradient_requests_are_422(server):
    grad = {**SMALL, "do": SMALL["q"]}
    for body, field in [
        (message(SMALL), "do"),
        (message(grad, dropout_p=0.5), "dropout_seed"),
        (message({**grad, "o": SMALL["q"]}), "lse"),
        (message(grad, grads=["dsinks"]), "grads"),
        (message({**grad, "attn_mask": torch.ones(2, 2, dtype=torch.bool)}, grads=["dattn_mask"]), "grads"),
    ]:
        document = problem(post(server, "/attention/grad", body), 422, "invalid_request")
        assert [error["loc"] for error in document["errors"]] == [[field]]


def test_without_a_known_key_401(strict):
    for headers in ({}, *({"authorization": value} for value in ("Bearer wrong", "Bearer ", "Basic all", "all"))):
        answer = post(strict, "/attention", GOOD, **headers)
        problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_key_without_the_right_403(strict):
    problem(post(strict, "/attention", GOOD, authorization="Bearer looker"), 403, "forbidden")
    assert post(strict, "/attention", GOOD, authorization="Bearer all").status == 200
    for key, status in (("looker", 200), ("all", 200), ("no", 401)):
        assert ask(strict, "/info", authorization=f"Bearer {key}").status == status
    assert ask(strict, "/health/live").status == 200
    assert ask(strict, "/health/ready").status == 200


def test_rights_to_verify_and_to_time(strict):
    shape = {"q_heads": 2, "q_len": 8, "head_dim": 8}
    calls = {"/verify": json.dumps({"shape": shape}), "/benchmark": json.dumps(ENDLESS)}
    for path, body in calls.items():
        problem(post(strict, path, body.encode(), JSON), 401, "unauthorized")
        problem(post(strict, path, body.encode(), JSON, authorization="Bearer looker"), 403, "forbidden")
    assert post(strict, "/verify", calls["/verify"].encode(), JSON, authorization="Bearer prover").json["ok"]
    job = post(strict, "/benchmark", calls["/benchmark"].encode(), JSON, authorization="Bearer prover")
    assert job.status == 202
    cancel(strict, job, "prover")
    problem(post(strict, "/attention", GOOD, authorization="Bearer prover"), 403, "forbidden")


ENDLESS = {  # 1,000 calls of each case take minutes
    "shapes": [{"batch": 4, "q_heads": 4, "q_len": 1024, "head_dim": 32}] * 3,
    "max_seconds": 500.0, "relative_precision": 1e-9, "backends": ["naive"],
}  # fmt: skip


def cancel(server, job, key):
    """Cancel a benchmark and wait for its end: the answer may come before its slice ends."""
    where, given = job.headers["location"], {"authorization": f"Bearer {key}"}
    assert ask(server, where, "DELETE", **given).status == 200
    wait_for(lambda: ask(server, where, **given).json["state"] == "cancelled", lambda: "it goes on")


def test_one_caller_may_have_half_of_the_benchmarks(strict):
    """Two benchmarks may run: the caller's second one gets 429 until the first has ended."""
    body = json.dumps(ENDLESS).encode()
    first = post(strict, "/benchmark", body, JSON, **KEY)
    assert first.status == 202
    assert first.headers["location"] == f"/benchmark/{first.json['id']}"
    problem(post(strict, "/benchmark", body, JSON, **KEY), 429, "queue_full")
    cancel(strict, first, "all")
    cancel(strict, post(strict, "/benchmark", body, JSON, **KEY), "all")


def test_unknown_addresses_404_and_methods_405(server):
    for path in ("/nothing", "/attention/", "/attention/grad/x"):
        problem(post(server, path, GOOD), 404, "not_found")
    answer = ask(server, "/attention")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    answer = post(server, "/health/live", b"")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"
    for path in ("/attention", "/benchmark/none/events"):  # without GET, or an endless GET
        assert ask(server, path, "HEAD").status == 405


@pytest.mark.parametrize("path", ["/", "/info", "/health/live", "/metrics", "/docs", "/openapi.json", "/v2"])
def test_head_is_get_without_a_body(server, path):
    whole, head = ask(server, path), ask(server, path, "HEAD")
    assert (head.status, head.body) == (200, b"")
    changing = ("date", "content-length", "x-request-id")  # counts differ between answers
    assert {n: v for n, v in head.headers.items() if n not in changing} == {
        n: v for n, v in whole.headers.items() if n not in changing
    }
    assert "content-length" in head.headers


@pytest.mark.parametrize("ms", ["1000000000000000", "9" * 5000, "0" * 30 + "60000"])
def test_a_longer_deadline_than_the_servers_is_cut(server, ms):
    assert post(server, "/attention", GOOD, x_timeout_ms=ms).status == 200


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "image/*, text/plain;q=0.5", "*/*;q=0"])
def test_an_answer_that_cannot_be_given_406(server, accept):
    problem(post(server, "/attention", GOOD, accept=accept), 406, "not_acceptable")


@pytest.mark.parametrize("media", ["text/plain", "application/x-npy", "multipart/form-data; boundary=x", None])
def test_a_body_of_another_type_415(server, media):
    problem(post(server, "/attention", GOOD, media), 415, "unsupported_media_type")
    problem(post(server, "/attention", GOOD, content_encoding="gzip"), 415, "unsupported_media_type")


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


def test_a_head_over_the_servers_limit_is_400(strict):
    problem(post(strict, "/attention", message_head({}, {"format": "x" * 4096}), **KEY), 400, "malformed_body")


def test_work_that_can_never_fit_413(strict, server):
    many = {name: torch.empty(9, 1, 0, 8) for name in "qkv"}
    problem(post(strict, "/attention", message(many), **KEY), 413, "work_too_large")
    # 40 MB of q and v, without keys; the answer would have 10^12 zeros
    wide = {"q": torch.zeros(1, 1, 10**6, 1), "k": torch.zeros(1, 1, 0, 1), "v": torch.zeros(1, 1, 0, 10**6)}
    problem(post(server, "/attention", message(wide, backend="reference")), 413, "work_too_large")
    as_json = post(strict, "/attention", message({n: normal(1, 1, 200, 128) for n in "qkv"}), accept=JSON, **KEY)
    problem(as_json, 413, "work_too_large")


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
    """Single bytes must not keep a connection: the server limits the rate, too."""
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


def test_a_chunk_that_is_none_is_400_and_the_connection_ends(server):
    chunk = b"%x\r\n%s\r\n" % (len(GOOD), GOOD)
    for begin in (b"", chunk[:-1], chunk):  # the body never ends, even after its last byte
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


@pytest.mark.parametrize("path", ["/attention", "/verify", "/benchmark", "/v2/models/attention/infer"])
def test_a_client_that_vanishes_in_its_body_leaves_the_server_serving(server, path):
    """One log line says that it left; this is no error of the server."""
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


def test_a_body_that_is_refused_before_it_has_come_costs_no_connection_where_it_is_short(server):
    """After its answer the server discards the rest of the body, and reads the next request."""
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


def test_a_request_id_is_echoed_when_it_is_sane_and_made_when_not(server):
    assert post(server, "/attention", GOOD, x_request_id="a-b:c.1").headers["x-request-id"] == "a-b:c.1"
    for strange in ("a b", "x" * 129, '"}{'):
        made = problem(post(server, "/attention", b"", x_request_id=strange), 400, "malformed_body")["request_id"]
        assert len(made) == 32
    answer = ask(server, "/nothing", x_request_id="mine")
    assert (answer.headers["x-request-id"], answer.json["request_id"]) == ("mine", "mine")
    assert answer.headers["content-type"] == PROBLEM


@pytest.mark.parametrize(("key", "statuses"), [("none", [401]), ("all", [100, 200])])
def test_expect_100_continue_is_answered_before_the_body_is_sent(strict, key, statuses):
    """A request refused by its headers gets no 100 Continue; any other gets one."""
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
        # Without 100 Continue the client may or may not send the body: the next bytes are ambiguous.
        assert (b"connection: close" in fields) == (statuses == [401])


def test_the_documentation_is_served(server):
    assert b"/openapi.json" in ask(server, "/docs").body
    paths = ask(server, "/openapi.json").json["paths"]

    def example(path):
        return paths[path]["post"]["requestBody"]["content"][JSON]["examples"]["causal"]["value"]

    answer = post(server, "/attention", json.dumps(example("/attention")).encode(), JSON)
    assert answer.status == 200
    assert answer.json["o"][0] == [1.0, 2.0]  # the first query sees only the first key
    answer = post(server, "/attention/grad", json.dumps(example("/attention/grad")).encode(), JSON, x_priority=9)
    assert set(answer.json) == {"dq", "dk", "dv", "dtype", "backend", "kernel"}
