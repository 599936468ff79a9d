"""Requests without our client: http.client, and the reader and writer of the safetensors package."""

import contextlib
import http.client
import json
import re
import urllib.request
from dataclasses import dataclass

with contextlib.suppress(ImportError):  # tests that send no tensors run without torch
    import safetensors.torch
    import torch

PATIENCE = 240  # seconds for an answer; only a hang takes so long
SAFETENSORS = "application/vnd.safetensors"
JSON = "application/json"
PROBLEM = "application/problem+json"


@dataclass
class Reply:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def tensors(self):
        assert self.status == 200, self.body
        assert self.headers["content-type"] == SAFETENSORS
        return safetensors.torch.load(self.body)

    @property
    def metadata(self):
        size = int.from_bytes(self.body[:8], "little")
        return json.loads(self.body[8 : 8 + size])["__metadata__"]


def message(tensors, **options):
    """Return a safetensors message."""
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return safetensors.torch.save({n: t.contiguous().clone() for n, t in tensors.items()}, metadata or None)


def message_head(entries, metadata=None):
    """Return a safetensors head with any entries, valid or not."""
    text = json.dumps({**({"__metadata__": metadata} if metadata else {}), **entries}).encode()
    return len(text).to_bytes(8, "little") + text


def post(server, path, body, media=SAFETENSORS, **headers):
    """POST on a new connection; `x_timeout_ms=5` is the header X-Timeout-Ms."""
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    if media is not None:
        named["Content-Type"] = media
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as connection:
        connection.request("POST", path, body, named, encode_chunked=not isinstance(body, bytes))
        return reply(connection.getresponse())


def ask(server, path, method="GET", **headers):
    """Send a request without a body on a new connection; headers as in `post`."""
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as connection:
        connection.request(method, path, headers=named)
        return reply(connection.getresponse())


def reply(response):
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def read_metrics(server):
    """Return the samples of /metrics, by name and labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^([^#\s]+) (\S+)$", text, re.MULTILINE)}


def normal(*shape, seed=0, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or torch.float32)


def small(**options):
    """Return a message with q, k and v of shape (2, 3)."""
    return message({name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}, **options)


def problem(answer, status, code):
    """Check the problem document of `answer`, and return it."""
    assert (answer.status, answer.json.get("code")) == (status, code), answer
    assert answer.headers["content-type"] == PROBLEM
    document = answer.json
    assert document["status"] == status
    assert document["type"] == f"/docs/errors#{document['code']}"
    assert document["request_id"] == answer.headers["x-request-id"]
    assert document["title"]
    assert document["detail"]
    return document


def refused_by_protocol(server):
    """Check that paths below /v2 answer 503, with an error as the Open Inference Protocol defines it."""
    answers = [server.get(path) for path in ("/v2/health/ready", "/v2/models/attention/ready")]
    answer = post(server, "/v2/models/attention/infer", b"{}", None)
    for status, document in (*answers, (answer.status, answer.json)):
        assert (status, list(document)) == (503, ["error"])
