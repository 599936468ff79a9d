"""An infer request begins with a JSON head. Tensors are numbers in the head or bytes after it; a wrong head is refused.

The header Inference-Header-Content-Length gives the length of the head.
"""

import json
import socket

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.oip.message import LENGTH, call, entry, infer, raw, request, wanted
from tests.support.oip.problem import BOUNDS, B, H, S, near, problem, truth

SMALL = problem()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_numbers_in_json_both_ways_are_the_bytes(url, dtype):
    binary = infer(url, "attention", problem(dtype), outputs=[wanted("o", binary_data=True)])
    text = infer(url, "attention", problem(dtype), numbers="qkv")
    assert LENGTH not in text.headers
    assert text.headers["content-type"] == "application/json"
    assert torch.equal(text.tensors["o"], binary.tensors["o"])


def test_numbers_may_be_nested(url):
    tensors = {n: t[0, 0] for n, t in SMALL.items()}
    head = {"inputs": [{**entry(n, t, False), "data": t.tolist()} for n, t in tensors.items()]}
    nested = call(url, "POST", "/v2/models/attention/infer", json.dumps(head).encode())
    assert torch.equal(nested.tensors["o"], infer(url, "attention", tensors, numbers="qkv").tensors["o"])


@pytest.mark.parametrize("numbers", ["q", "k", "qv"])
def test_inputs_in_numbers_and_in_bytes_may_be_mixed(url, numbers):
    outputs = [wanted("lse", binary_data=False), wanted("o", binary_data=True)]
    mixed = infer(url, "attention", SMALL, numbers=numbers, outputs=outputs)
    plain = infer(url, "attention", SMALL, outputs=[wanted("o", binary_data=True), wanted("lse", binary_data=True)])
    assert list(mixed.tensors) == ["lse", "o"]
    assert torch.equal(mixed.tensors["o"], plain.tensors["o"])
    assert torch.equal(mixed.tensors["lse"], plain.tensors["lse"])


def test_numbers_that_are_not_finite(url):
    """A request may write -∞ as the string "-Infinity" or as the literal of Python's json; an answer has the string."""
    mask = torch.zeros(S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    tensors = {**SMALL, "attn_mask": mask}
    head, data = request(tensors, numbers=["attn_mask"], parameters={"binary_data_output": True})
    assert b"-Infinity" in head
    path = "/v2/models/attention/infer"
    literal = call(url, "POST", path, head + data, **{LENGTH: len(head)})
    near(literal.tensors["o"], truth(SMALL, causal=True)["o"], BOUNDS[torch.float32])
    head = head.replace(b"-Infinity", b'"-Infinity"')
    assert torch.equal(call(url, "POST", path, head + data, **{LENGTH: len(head)}).tensors["o"], literal.tensors["o"])
    hidden = infer(
        url, "attention", {**SMALL, "kv_lengths": torch.zeros(B, dtype=torch.int32)}, outputs=[wanted("lse")]
    )
    assert hidden.head["outputs"][0]["data"] == ["-Infinity"] * (B * H * S)


def test_a_head_of_any_length_comes_before_bytes_of_any_alignment(url):
    plain = infer(url, "attention", SMALL, parameters={"binary_data_output": True}).tensors["o"]
    for pad in range(1, 4):
        head, data = request(SMALL, parameters={"binary_data_output": True}, id="x" * pad)
        reply = call(url, "POST", "/v2/models/attention/infer", head + data, **{LENGTH: len(head)})
        assert torch.equal(reply.tensors["o"], plain)


def test_a_chunked_body(url):
    head, data = request(SMALL, parameters={"binary_data_output": True})
    body = head + data
    pieces = iter([body[:7], body[7 : len(head) + 3], body[len(head) + 3 :]])
    reply = call(url, "POST", "/v2/models/attention/infer", pieces, **{LENGTH: len(head)})
    near(reply.tensors["o"], truth(SMALL)["o"], BOUNDS[torch.float32])


Q = entry("q", SMALL["q"])


SIZE = Q["parameters"]["binary_data_size"]


def broken(**changes):
    """Return the head of a request whose first input has these fields changed. None removes a field."""
    first = {name: value for name, value in {**Q, **changes}.items() if value is not None}
    return json.dumps({"inputs": [first, entry("k", SMALL["k"]), entry("v", SMALL["v"])]}).encode()


DATA = b"".join(raw(SMALL[n]) for n in "qkv")


MALFORMED = {
    "not JSON": b"{",
    "a list": b"[]",
    "not UTF-8": b'{"inputs": "\xff"}',
    "no inputs": b"{}",
    "inputs that are no list": b'{"inputs": 1}',
    "a key twice": b'{"inputs": [], "inputs": []}',
    "an unknown key": b'{"inputs": [], "input": []}',
    "deep": b'{"inputs": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "no name": broken(name=None),
    "size is not the shape's": broken(parameters={"binary_data_size": SIZE - 4}),
    "negative size": broken(parameters={"binary_data_size": -SIZE}),
    "size is a string": broken(parameters={"binary_data_size": str(SIZE)}),
    "neither data nor bytes": broken(parameters=None),
    "both data and bytes": broken(data=[0.0]),
    "an id of numbers": json.dumps({"inputs": [], "id": 5}).encode(),
    "parameters are a list": broken(parameters=[]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_400_and_the_server_goes_on(url, name):
    head = MALFORMED[name]
    reply = call(url, "POST", "/v2/models/attention/infer", head + DATA, **{LENGTH: len(head)})
    assert reply.status == 400, reply.body
    assert reply.error
    assert infer(url, "attention", SMALL).status == 200


HEAD, _ = request(SMALL)


WRONG_LENGTHS = {
    "fewer bytes than the head says": (HEAD + DATA[:-1], len(HEAD)),
    "more bytes than the head says": (HEAD + DATA + b"x", len(HEAD)),
    "a length within the head": (HEAD + DATA, len(HEAD) - 1),
    "a length beyond the body": (HEAD + DATA, len(HEAD + DATA) + 1),
    "a length that is no number": (HEAD + DATA, "-5"),
    "a raw request": (DATA, 0),
    "no length, and bytes behind the JSON": (HEAD + DATA, None),
    "no length, and none that came": (HEAD, None),
}


@pytest.mark.parametrize("name", WRONG_LENGTHS)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_wrong_length_is_400(url, name, chunked):
    body, length = WRONG_LENGTHS[name]
    headers = {} if length is None else {LENGTH: length}
    reply = call(url, "POST", "/v2/models/attention/infer", iter([body]) if chunked else body, **headers)
    assert reply.status == 400, reply.body
    assert reply.error


PATH = "/v2/models/attention/infer"


KEY = {"authorization": "Bearer all"}


def test_a_head_before_bytes_has_its_limit(locked):
    reply = infer(locked.url, "attention", SMALL, headers=KEY, id="x" * 4096)
    assert reply.status == 400
    assert "4096" in reply.error


def test_a_request_is_refused_from_its_head(locked):
    """An invalid head gets 422 before the tensors arrive: the client sends nothing after the head."""
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
