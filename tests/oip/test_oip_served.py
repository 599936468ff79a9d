"""The routes of /v2 have the same bits, keys, limits and counts as the server's other routes."""

import contextlib
import gzip
import socket
import zlib

import pytest
import torch

from tests.support.messages import message
from tests.support.oip.grpc_calls import Caller
from tests.support.oip.grpc_calls import request as rpc_request
from tests.support.oip.message import LENGTH, call, infer, raw, request, wanted
from tests.support.oip.problem import GRAD, problem
from tests.support.servers import wait_for

MIB = 1 << 20
SMALL = problem()
PATH = "/v2/models/attention/infer"


@pytest.fixture(scope="module")
def locked(held):
    """Return a server with keys and small limits."""
    return held.server


KEY = {"authorization": "Bearer all"}


@pytest.mark.parametrize(("path", "model", "names"), [("", "attention", "qkv"), ("/grad", "attention_grad", GRAD)])
def test_an_answer_is_bit_for_bit_that_of_the_other_encoding(locked, path, model, names):
    tensors = problem(names=names)
    body = message(tensors, causal=True, window=[7, -1])
    ours = call(locked.url, "POST", "/attention" + path, body, content_type="application/vnd.safetensors", **KEY)
    assert ours.status == 200, ours.body
    parameters = {"causal": True, "window_left": 7, "binary_data_output": True}
    theirs = infer(locked.url, model, tensors, parameters=parameters, headers=KEY)
    data = b"".join(raw(t) for t in theirs.tensors.values())
    assert ours.body.endswith(data)
    assert theirs.headers["x-backend"] == theirs.head["parameters"]["backend"] == ours.headers["x-backend"]
    assert theirs.headers["server-timing"].startswith("decode;dur=")


def test_a_key_is_needed_and_its_right(locked):
    for headers, status in (({}, 401), ({"authorization": "Bearer looks"}, 403)):
        refused = infer(locked.url, "attention", SMALL, headers=headers)
        assert refused.status == status
        assert "key" in refused.error
    for path, right in (("", "looks"), ("/models/attention", "looks"), ("/models/attention/stats", "counts")):
        assert call(locked.url, "GET", "/v2" + path).status == 401
        assert call(locked.url, "GET", "/v2" + path, authorization="Bearer asks").status == 403
        assert call(locked.url, "GET", "/v2" + path, authorization=f"Bearer {right}").status == 200
    assert infer(locked.url, "attention", SMALL, headers={"authorization": "Bearer asks"}).status == 200
    for path in ("/health/live", "/health/ready", "/models/attention/ready"):
        assert call(locked.url, "GET", "/v2" + path).status == 200


LARGE = {name: torch.zeros(1, 1, 512, 256) for name in "qkv"}  # 1.5 MiB
WIDE = {name: torch.zeros(1, 1, 64, 256) for name in "qkv"}  # an answer of slightly over 64 KiB


def bomb(coding):
    """Return a head and tensors within the limit, and following bytes that exceed it."""
    head, _ = request(LARGE)
    packed = zlib.compressobj(9, wbits=31 if coding == "gzip" else 15)
    return packed.compress(head + bytes(8 * MIB)) + packed.flush(), {LENGTH: len(head), "content-encoding": coding}


TOO_LARGE = {
    "by its length": lambda: (bytes(2 * MIB), {LENGTH: 100}),
    "by its head": lambda: (lambda head: (iter([head]), {LENGTH: len(head)}))(request(LARGE)[0]),
    "in numbers": lambda: (b" " * 70_000 + b"{}", {}),
    "in numbers, chunked": lambda: (iter([b" " * 40_000] * 2), {}),
    "as gzip inflates": lambda: bomb("gzip"),
    "as deflate inflates": lambda: bomb("deflate"),
    "in numbers, as it inflates": lambda: (gzip.compress(bytes(8 * MIB)), {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("how", TOO_LARGE)
def test_a_body_over_the_limit_is_413(locked, how):
    body, headers = TOO_LARGE[how]()
    reply = call(locked.url, "POST", PATH, body, **KEY, **headers)
    assert reply.status == 413, reply.body
    assert "limit" in reply.error
    assert infer(locked.url, "attention", SMALL, headers=KEY).status == 200


def test_an_answer_in_numbers_has_a_limit_and_one_in_bytes_has_none(locked):
    wide = {**WIDE, "q": torch.zeros(1, 1, 65, 256)}
    assert infer(locked.url, "attention", wide, headers=KEY).status == 413
    outputs = [wanted("o", binary_data=True), wanted("lse", binary_data=False)]
    assert infer(locked.url, "attention", wide, headers=KEY, outputs=outputs).status == 200


def test_a_head_before_bytes_has_its_limit(locked):
    reply = infer(locked.url, "attention", SMALL, headers=KEY, id="x" * 4096)
    assert reply.status == 400
    assert "4096" in reply.error


def test_a_request_is_refused_from_its_head(locked):
    """The answer arrives although the client sends nothing after the head."""
    head, data = request(SMALL, parameters={"casual": True})
    fields = {LENGTH: len(head), "content-length": len(head + data), "host": "there", **KEY}
    text = f"POST {PATH} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", locked.port), timeout=600) as sock:
        sock.sendall(text.encode() + b"\r\n" + head)
        got = b""
        while b"casual" not in got:
            piece = sock.recv(65536)
            assert piece, got
            got += piece
    assert got.startswith(b"HTTP/1.1 422 ")


@pytest.mark.parametrize(("ms", "us"), [(60_000, 1), (1, 60_000_000)])
def test_the_sooner_deadline_counts(held, ms, us):
    with held.shut() as name:
        headers = {**KEY, "x-request-id": name, "x-timeout-ms": ms}
        parameters = {"timeout": us, "backend": "reference"}
        late = infer(held.server.url, "attention", SMALL, headers=headers, parameters=parameters)
    assert late.status == 504
    assert "deadline" in late.error


def test_the_headers_of_the_other_routes_are_checked(locked):
    bad = infer(locked.url, "attention", SMALL, headers={**KEY, "x-priority": 12}, parameters={"priority": 1})
    assert bad.status == 422
    assert "X-Priority" in bad.error


@pytest.mark.slow
def test_workers_share_the_grpc_port_and_their_statistics(start_server):
    server = start_server(workers=2, grpc_port=0)

    def ports():
        return [line["port"] for line in list(server.lines) if line["event"] == "listening for gRPC"]

    def count():
        (stats,) = call(server.url, "GET", "/v2/models/attention/stats").head["model_stats"]
        return stats["inference_stats"]["success"]["count"]

    wait_for(lambda: len(ports()) == 2, ports)
    (port,) = set(ports())
    for _ in range(8):  # either worker may take a connection
        with contextlib.closing(Caller(port)) as caller:
            wait_for(lambda caller=caller: caller.ask("ServerReady").ready, lambda: "not ready")
            assert caller.infer(rpc_request(SMALL)).bits
    for _ in range(12):
        assert infer(server.url, "attention", SMALL).status == 200
    wait_for(lambda: count() == 20, count)  # a worker may count a request after it has sent the answer
    assert {count() for _ in range(8)} == {20}
    metrics = call(server.url, "GET", "/metrics").body.decode()
    assert 'flashpoint_model_requests_total{how="success",model="attention"} 20.0' in metrics


def test_shared_memory_is_off_by_default(server):
    for method, path in (("GET", "/region/a/status"), ("POST", "/region/a/register")):
        body = b"{}" if method == "POST" else None
        reply = call(server.url, method, "/v2/systemsharedmemory" + path, body)
        assert reply.status == 404
        assert "off" in reply.error
    place = {"shared_memory_region": "a", "shared_memory_byte_size": MIB}
    reply = infer(server.url, "attention", SMALL, outputs=[wanted("o", **place)])
    assert reply.status == 422
    assert "off" in reply.error
    assert "system_shared_memory" not in call(server.url, "GET", "/v2").head["extensions"]


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_what_is_off_has_no_regions_and_unregisters_nothing(server, kind):
    """Triton's clients start with these calls on any server."""
    path = f"/v2/{kind}sharedmemory"
    assert call(server.url, "GET", f"{path}/status").head == []
    for of in ("", "/region/any"):
        reply = call(server.url, "POST", f"{path}{of}/unregister", b"")
        assert (reply.status, reply.head) == (200, {})


def test_each_request_has_its_log_line(locked):
    actual = infer(locked.url, "attention", SMALL, headers={**KEY, "x-request-id": "one-of-v2"})
    assert actual.headers["x-request-id"] == "one-of-v2"
    line = locked.wait_for_request("one-of-v2")
    assert line["route"] == PATH
    assert line["status"] == 200
    assert line["backend"] == "torch"
    assert line["shapes"] == {name: [1, 2, 24, 16] for name in "qkv"}
