"""A malformed safetensors body gets 400, and the server continues to serve."""

import struct

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import message_head, post, problem, small

GOOD = small()


HEADS = {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * i, 24 * i + 24]} for i, name in enumerate("qkv")}


DATA = bytes(72)


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


@pytest.mark.parametrize("path", ["/attention", "/attention/grad"])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_400_and_the_server_goes_on(server, path, name):
    problem(post(server, path, MALFORMED[name]), 400, "malformed_body")
    assert post(server, "/attention", GOOD).status == 200


@pytest.mark.parametrize("change", [-1, 1], ids=["too short", "too long"])
def test_a_chunked_body_of_another_size_than_its_head_says_is_400(server, change):
    body = GOOD[:change] if change < 0 else GOOD + b"x"
    problem(post(server, "/attention", iter([body[:10], body[10:100], body[100:]])), 400, "malformed_body")


KEY = {"authorization": "Bearer all"}


def test_a_head_over_the_servers_limit_is_400(strict):
    problem(post(strict, "/attention", message_head({}, {"format": "x" * 4096}), **KEY), 400, "malformed_body")
