"""A server refuses wrong requests with the right status and message, and continues; part of the conformance suite."""

import json

import pytest

from tests.support.oip.message import LENGTH, PACK, call, entry, infer, raw, request, wanted
from tests.support.oip.problem import D, H, S, problem

SMALL = problem()
Q = entry("q", SMALL["q"])
SIZE = Q["parameters"]["binary_data_size"]


def broken(**changes):
    """Return a request whose first input has changed fields; None removes a field."""
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


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("change", [lambda b: b[:-9], lambda b: b + b"x", lambda b: b"x" + b, lambda b: b""])
def test_a_body_that_does_not_inflate_is_400(url, coding, change):
    body = change(PACK[coding](HEAD + DATA))
    headers = {LENGTH: len(HEAD), "content-encoding": coding}
    reply = call(url, "POST", "/v2/models/attention/infer", body, **headers)
    assert reply.status == 400, reply.body
    assert reply.error


INVALID = {
    "a datatype nobody knows": ("q", {"datatype": "FP31"}, {}),
    "a datatype that is not served": ("q", {"datatype": "INT8", "parameters": {"binary_data_size": SIZE // 4}}, {}),
    "strings": ("q", {"datatype": "BYTES"}, {}),
    "an unknown input": ("w", {"name": "w"}, {}),
    "an unknown parameter": ("casual", {}, {"parameters": {"casual": True}}),
    "an unknown parameter of an input": ("q", {"parameters": {"binary_data_size": SIZE, "offset": 0}}, {}),
    "a negative dimension": ("q", {"shape": [-1, -1, S, D]}, {}),
    "a shape of floats": ("q", {"shape": [1.0, H, S, D]}, {}),
    "a shape that overflows": ("q", {"shape": [1 << 40, 1 << 40, 0, D], "parameters": {"binary_data_size": 0}}, {}),
    "too many dimensions": ("q", {"shape": [1] * 17, "parameters": {"binary_data_size": 4}}, {}),
    "an input twice": ("k", {"name": "k"}, {}),
    "an output twice": ("o", {}, {"outputs": [wanted("o"), wanted("o")]}),
    "a parameter that is a list": ("window", {}, {"parameters": {"window": [1, 2]}}),
    "gradients that are no names": ("grads", {}, {"parameters": {"grads": True}}),
    "a parameter of another type": ("causal", {}, {"parameters": {"causal": "yes"}}),
    "a window by another name, too": ("window", {}, {"parameters": {"window": "1", "window_left": 1}}),
    "a window of words": ("window", {}, {"parameters": {"window_left": "wide"}}),
    "a gradient that is none": ("dw", {}, {"outputs": [wanted("dw")]}),
    "an output that is left out": ("lse", {}, {"outputs": [wanted("lse")], "parameters": {"return_lse": False}}),
    "classification": ("o", {}, {"outputs": [wanted("o", classification=1)]}),
    "binary_data of a number": ("binary_data", {}, {"outputs": [wanted("o", binary_data=1)]}),
    "a negative timeout": ("timeout", {}, {"parameters": {"timeout": -1}}),
    "a timeout of words": ("timeout", {}, {"parameters": {"timeout": "soon"}}),
    "a priority beyond the last": ("priority", {}, {"parameters": {"priority": 11}}),
    "a sequence": ("sequence_id", {}, {"parameters": {"sequence_id": 7}}),
    "numbers of another shape": ("q", {"parameters": None, "data": [0.0]}, {}),
    "numbers that are words": ("q", {"shape": [1], "parameters": None, "data": ["nought"]}, {}),
    "numbers beyond the datatype": ("q", {"shape": [1], "datatype": "FP16", "parameters": None, "data": [1e9]}, {}),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_request_is_422_and_names_what_is_wrong(url, name):
    field, changes, more = INVALID[name]
    document = json.loads(broken(**changes)) | more
    size = sum(i.get("parameters", {}).get("binary_data_size", 0) for i in document["inputs"])
    head = json.dumps(document).encode()
    reply = call(url, "POST", "/v2/models/attention/infer", head + bytes(size), **{LENGTH: len(head)})
    assert reply.status == 422, reply.body
    assert field in reply.error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/nothing", 404),
        ("GET", "/v2/models/nothing/ready", 404),
        ("GET", "/v2/models/attention/versions/2", 404),
        ("POST", "/v2/models/nothing/infer", 404),
        ("POST", "/v2/models/attention/versions/2/infer", 404),
        ("POST", "/v2/cudasharedmemory/region/r/register", 404),
        ("GET", "/v2/models/attention/infer", 405),
        ("DELETE", "/v2/models/attention", 405),
        ("POST", "/v2/health/live", 405),
    ],
)
def test_what_is_not_there_is_an_error_like_any_other(url, method, path, status):
    reply = call(url, method, path, b"" if method == "POST" else None)
    assert reply.status == status
    assert reply.error


def test_a_coding_that_is_not_served_is_415(url):
    reply = infer(url, "attention", SMALL, headers={"content-encoding": "br"})
    assert reply.status == 415
    assert "br" in reply.error
