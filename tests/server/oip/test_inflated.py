"""A compressed request body is read if its decompressed size is within the limit, and refused otherwise."""

import gzip
import zlib

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.oip.message import LENGTH, PACK, call, infer, raw, request
from tests.support.oip.problem import near, problem, truth

SMALL = problem()


@pytest.mark.parametrize("coding", PACK)
def test_compressed_requests(url, coding):
    """Compressed requests work; Inference-Header-Content-Length is then the length of the head before compression."""
    expected = truth(SMALL)["o"]
    parameters = {"binary_data_output": True}
    near(infer(url, "attention", SMALL, coding=coding, parameters=parameters).tensors["o"], expected, 2e-6)
    near(infer(url, "attention", SMALL, coding=coding, numbers="qkv").tensors["o"], expected, 2e-6)


DATA = b"".join(raw(SMALL[n]) for n in "qkv")


HEAD, _ = request(SMALL)


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("change", [lambda b: b[:-9], lambda b: b + b"x", lambda b: b"x" + b, lambda b: b""])
def test_a_body_that_does_not_inflate_is_400(url, coding, change):
    body = change(PACK[coding](HEAD + DATA))
    headers = {LENGTH: len(HEAD), "content-encoding": coding}
    reply = call(url, "POST", "/v2/models/attention/infer", body, **headers)
    assert reply.status == 400, reply.body
    assert reply.error


def test_a_coding_that_is_not_served_is_415(url):
    reply = infer(url, "attention", SMALL, headers={"content-encoding": "br"})
    assert reply.status == 415
    assert "br" in reply.error


MIB = 1 << 20


PATH = "/v2/models/attention/infer"


KEY = {"authorization": "Bearer all"}


LARGE = {name: torch.zeros(1, 1, 512, 256) for name in "qkv"}  # 1.5 MiB


def bomb(coding):
    """Return (compressed body, headers): a valid head, followed by more bytes than the limit when decompressed."""
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
