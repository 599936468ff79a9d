"""A numpy model of the service's KV caches, and requests that change or read the caches.

A POST request carries an Idempotency-Key: a caller may repeat the request until an answer comes, and it takes effect
once. `Request.heard` compares an answer with the model, and makes the same change to the model as the request made to
the caches.
"""

from __future__ import annotations

import http.client
import json
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.forms import truth
from chaos.callers import Answer, WrongError, send
from chaos.keys import bearer
from chaos.questions import parsed, safetensors
from chaos.service import Life
from flashpoint_contract.schemas import jsonwire

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SHAPE = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": DIM}
KEYS = 64  # number of idempotency keys that a cache remembers
# Allowed errors of attention in float32, as in tests/server/routes/compute/test_cached_attention.py.
RELATIVE, ABSOLUTE = 1e-4, 1e-5


@dataclass(eq=False)
class HeldCache:
    """The model of one cache: `layers` has k and v of each layer, (2, n, Hk, D).

    The cache cannot expire before `earliest`, in `time.monotonic` seconds.
    """

    id: str
    life: Life
    ttl: float
    earliest: float
    layers: list[np.ndarray] = field(default_factory=lambda: [empty() for _ in range(LAYERS)])
    written: deque[Request] = field(default_factory=lambda: deque(maxlen=KEYS - 2))  # latest writes to this cache alone
    last: Request | None = None

    @property
    def lengths(self) -> list[int]:
        return [layer.shape[1] for layer in self.layers]


@dataclass(eq=False)
class Request:
    """A request of a caller. `unsure`: an attempt may have taken effect, although no answer has come.

    If `refused` is given, the service must refuse the request, and `refused` returns whether an error code is right. If
    `uses`, the request restarts the time to live of `caches`; if `frees`, it deletes these caches. `ttl` is the time to
    live, in seconds, of the caches that the request makes.
    """

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    success: int
    heard: Callable[[Answer], None]
    caches: Sequence[HeldCache] = ()
    refused: Callable[[str], bool] | None = None
    ttl: float | None = None
    uses: bool = False
    frees: bool = False
    unsure: bool = False
    tries: int = 0
    first: float = 0.0  # time of the first attempt, in `time.monotonic` seconds

    def send(self, connection: http.client.HTTPConnection, owner: str) -> Answer:
        """Send the request, and return the answer. Raises OSError, HTTPException and WrongError."""
        return send(connection, self.method, self.path, self.body or None, {**self.headers, **bearer(owner)})


def empty() -> np.ndarray:
    return np.zeros((2, 0, KV_HEADS, DIM), np.float32)


def asks(
    method: str, path: str, document: object, success: int, heard: Callable[[Answer], None], **how: Any
) -> Request:
    """Return a request with the JSON body `document`, or without a body if it is None."""
    body = b"" if document is None else json.dumps(document).encode()
    headers = {} if document is None else {"Content-Type": jsonwire.MEDIA_TYPE}
    if method == "POST":
        headers["Idempotency-Key"] = secrets.token_hex(12)
    return Request(method, path, body, headers, success, heard, **how)


def carries(tensors: dict[str, np.ndarray], options: dict[str, Any], path: str, heard: Any, **how: Any) -> Request:
    """Return a POST request with `tensors` and `options` in safetensors, and with an Idempotency-Key."""
    question = safetensors({n: np.ascontiguousarray(t) for n, t in tensors.items()}, options, path)
    headers = {"Content-Type": question.headers["Content-Type"], "Idempotency-Key": secrets.token_hex(12)}
    return Request("POST", path, question.body, headers, 200, heard, **how)


# Functions that return requests, and check their answers


def append(cache: HeldCache, layer: int, tokens: np.ndarray, at: int | None) -> Request:
    """Return a request that appends `tokens`, k and v (2, n, Hk, D), or writes them at position `at`."""

    def heard(answer: Answer) -> None:
        wrote(request, [cache], layer, tokens[:, None], None if at is None else [at])
        same("length", answer.json, {"length": cache.lengths[layer]})

    k, v = tokens.swapaxes(1, 2)
    options: dict[str, Any] = {"layer": layer} | ({} if at is None else {"at": at})
    request = carries({"k": k, "v": v}, options, f"/caches/{cache.id}/append", heard, caches=[cache], uses=True)
    return request


def attend(
    caches: Sequence[HeldCache], layer: int, q: np.ndarray, tokens: np.ndarray | None, at: list[int] | None,
    options: dict[str, Any],
) -> Request:  # fmt: skip
    """Return a request for attention of q (B, Hq, n, D), which first writes `tokens` (2, B, n, Hk, D), if any."""
    outputs: list[bytes] = []

    def heard(answer: Answer) -> None:
        if tokens is not None:
            wrote(request, caches, layer, tokens, at)
        metadata, answered = parsed(answer.body)
        same("lengths", metadata["lengths"], [cache.lengths[layer] for cache in caches])
        expected = np.stack([dense(one, cache.layers[layer], **options) for one, cache in zip(q, caches, strict=True)])
        if not np.allclose(answered["o"], expected, RELATIVE, ABSOLUTE):
            raise WrongError(f"attention differs by {np.abs(answered['o'] - expected).max():.2g}")
        outputs.append(answered["o"].tobytes())
        if outputs[0] != outputs[-1]:
            raise WrongError("the same call has other bits when it is sent again")

    tensors = {"q": q}
    if tokens is not None:
        tensors |= dict(zip("kv", tokens.swapaxes(2, 3), strict=True))
    fields = {"caches": [cache.id for cache in caches], "layer": layer, **options}
    if at is not None:
        fields["at"] = at
    request = carries(tensors, fields, "/attention", heard, caches=caches, uses=True)
    return request


def export(cache: HeldCache, layer: int) -> Request:
    def heard(answer: Answer) -> None:
        _, tensors = parsed(answer.body)
        for name, expected in zip("kv", cache.layers[layer].swapaxes(1, 2), strict=True):
            if tensors[name].shape != (1, *expected.shape) or tensors[name].tobytes() != expected.tobytes():
                raise WrongError(f"other bits in {name} of {tensors[name].shape}")

    return asks("GET", f"/caches/{cache.id}/tensors?layer={layer}", None, 200, heard, caches=[cache])


def look(cache: HeldCache) -> Request:
    def heard(answer: Answer) -> None:
        described(answer.json, cache)

    return asks("GET", f"/caches/{cache.id}", None, 200, heard, caches=[cache])


def renew(cache: HeldCache) -> Request:
    def heard(answer: Answer) -> None:
        described(answer.json, cache)

    return asks("POST", f"/caches/{cache.id}/renew", {}, 200, heard, caches=[cache], uses=True)


def truncate(cache: HeldCache, length: int) -> Request:
    def heard(answer: Answer) -> None:
        if cache.last is not request:
            cache.layers = [layer[:, :length] for layer in cache.layers]
            keep(request, cache)
        described(answer.json, cache)

    document = {"length": length}
    request = asks("POST", f"/caches/{cache.id}/truncate", document, 200, heard, caches=[cache], uses=True)
    return request


def delete(caches: Sequence[HeldCache]) -> Request:
    def heard(answer: Answer) -> None:
        same("body", answer.body, b"")

    if len(caches) == 1:
        return asks("DELETE", f"/caches/{caches[0].id}", None, 204, heard, caches=caches, frees=True)
    document = {"caches": [cache.id for cache in caches]}
    return asks("POST", "/caches/delete", document, 204, heard, caches=caches, frees=True)


# Functions that update and read the caches' model


def wrote(request: Request, caches: Sequence[HeldCache], layer: int, tokens: np.ndarray, at: list[int] | None) -> None:
    """Write `tokens` (2, B, n, Hk, D) to the model of `caches`, except where `request` has already written them."""
    for number, cache in enumerate(caches):
        if cache.last is request:
            continue
        old = cache.layers[layer]
        place = old.shape[1] if at is None else at[number]
        cache.layers[layer] = np.concatenate((old[:, :place], tokens[:, number]), 1)
        keep(request, cache)


def keep(request: Request, cache: HeldCache) -> None:
    """Remember a request as the last write of a cache."""
    cache.last = request
    if len(request.caches) == 1:
        cache.written.append(request)


def described(document: Any, cache: HeldCache) -> None:
    same("id", document["id"], cache.id)
    same("lengths", document["lengths"], cache.lengths)
    if not 0 <= document["expires_in_s"] <= cache.ttl + 0.001 or document["bytes"] <= 0:
        raise WrongError(f"a cache of {document['bytes']} bytes that expires in {document['expires_in_s']} s")


def same(what: str, value: object, expected: object) -> None:
    """Compare a value with the expected value. Raises WrongError."""
    if value != expected:
        raise WrongError(f"{what}: {value!r} where {expected!r} is right")


def dense(q: np.ndarray, kv: np.ndarray, causal: bool = False, window: Sequence[int] = (-1, -1)) -> np.ndarray:
    """Return attention of q (Hq, n, D) over k and v (2, S, Hk, D), in float64; 0 for a query that sees no key."""
    k, v = kv.transpose(0, 2, 1, 3)[:, None]
    return truth({"q": q[None], "k": k, "v": v}, causal, window[0])["o"][0]
