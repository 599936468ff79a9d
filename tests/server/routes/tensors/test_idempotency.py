"""An idempotency key names one call: its retries get the same answer, and every other call with it is refused."""

import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.caches import HQ, SHAPE, D, appended, bearer, created, kv, lengths
from tests.support.messages import JSON, SAFETENSORS, ask, message, normal, post, problem


@pytest.fixture
def cache(cache_server):
    """Yield the id of a cache with two tokens, and delete all caches after the test."""
    (one,) = created(cache_server)
    assert appended(cache_server, one, *kv(2, seed=1)).status == 200
    yield one
    left = [cache["id"] for cache in ask(cache_server, "/caches", **bearer("alice")).json["caches"]]
    if left:
        assert call(cache_server, "POST", "/caches/delete", {"caches": left}).status == 204


def call(server, method, path, body=None, key="", **headers):
    """Send a call of alice with an idempotency key. `body` is a document, or a safetensors message."""
    fields = {**bearer("alice"), **({"Idempotency-Key": key} if key else {}), **headers}
    if method != "POST":
        return ask(server, path, method, **fields)
    binary = isinstance(body, bytes)
    return post(
        server, path, body if binary else json.dumps(body or {}).encode(), SAFETENSORS if binary else JSON, **fields
    )


def sent(count=1, seed=3, **options):
    """Return a message that attends over a cache, and writes `count` tokens."""
    k, v = kv(count, seed)
    return message({"q": normal(1, HQ, count, D, seed=seed), "k": k, "v": v}, **options)


def pair(count=1, seed=3, **options):
    k, v = kv(count, seed)
    return message({"k": k[0], "v": v[0]}, **options)


# For each operation: the path, the first call's body, equal bodies, and bodies of other calls. `{}` is the cache's id.
CALLS = {
    "create": (
        "/caches",
        {**SHAPE, "count": 2},
        [{"count": 2, "value_dim": SHAPE["head_dim"], "dtype": "float32", **SHAPE}],
        [{**SHAPE, "count": 1}, {**SHAPE, "head_dim": 32, "count": 2}, {**SHAPE, "count": 2, "ttl_s": 60},
         {**SHAPE, "count": 2, "max_length": 8}, {**SHAPE, "count": 2, "beside": "{}"}],
    ),
    "fork": (
        "/caches/fork",
        {"caches": ["{}"]},
        [{"lengths": None, "free": [], "caches": ["{}"]}],
        [{"caches": ["{}"] * 2}, {"caches": ["{}"], "lengths": [1]}, {"caches": ["{}"], "free": ["{}"]}],
    ),
    "truncate": ("/caches/{}/truncate", {"length": 1}, [], [{"length": 0}, {"length": 2}]),
    "append": (
        "/caches/{}/append",
        lambda _: pair(),
        [lambda _: pair(layer=0), lambda _: pair(layout="bhsd")],
        [lambda _: pair(seed=4), lambda _: pair(2), lambda _: pair(at=2), lambda _: pair(layer=1)],
    ),
    "attention": (
        "/attention",
        lambda one: sent(caches=[one], causal=True),
        [lambda one: sent(causal=True, caches=[one], scale=None, layer=0)],
        [lambda one: sent(caches=[one], causal=True, seed=4), lambda one: sent(caches=[one]),
         lambda one: sent(caches=[one], causal=True, at=[2]), lambda one: sent(caches=[one], causal=True, layer=1),
         lambda one: sent(caches=[one], causal=True, return_lse=True), lambda one: sent(2, caches=[one], causal=True)],
    ),
    "renew": ("/caches/{}/renew", {}, [], []),
}  # fmt: skip


def made(what, one):
    return what(one) if callable(what) else json.loads(json.dumps(what).replace("{}", one) if what else "{}")


@pytest.mark.parametrize("name", CALLS)
def test_a_retry_is_answered_as_the_first_call_and_another_call_is_refused(cache_server, cache, name):
    path, first, equal, others = CALLS[name]
    path, key = path.format(cache), f"one-{name}"
    answer = call(cache_server, "POST", path, made(first, cache), key)
    assert answer.status in (200, 201), answer
    state = ask(cache_server, f"/caches/{cache}", **bearer("alice")).json
    for body in (first, *equal):
        headers = {"X-Timeout-Ms": "60000", "X-Request-Id": "a-retry", "X-Priority": "9"}
        again = call(cache_server, "POST", path, made(body, cache), key, **headers)
        assert again.status == answer.status, again
        if name in ("create", "fork"):
            assert [one["id"] for one in again.json["caches"]] == [one["id"] for one in answer.json["caches"]]
        elif name in ("append", "attention"):
            assert again.body == answer.body
    for body in others:
        refusal = call(cache_server, "POST", path, made(body, cache), key)
        document = problem(refusal, 422, "idempotency_key_reused")
        assert "key of its own" in document["detail"]
    for other, (there, its, *_) in CALLS.items():
        if other != name:
            problem(
                call(cache_server, "POST", there.format(cache), made(its, cache), key), 422, "idempotency_key_reused"
            )
    for method, there, body in (("DELETE", f"/caches/{cache}", None), ("POST", "/caches/delete", {"caches": [cache]})):
        problem(call(cache_server, method, there, body, key), 422, "idempotency_key_reused")
    after = ask(cache_server, f"/caches/{cache}", **bearer("alice")).json
    assert after | {"expires_in_s": 0} == state | {"expires_in_s": 0}
    assert call(cache_server, "GET", f"/caches/{cache}", key=key).status == 200  # a key of a read means nothing


def test_a_call_that_took_no_effect_leaves_its_key_free(cache_server, cache):
    problem(call(cache_server, "POST", f"/caches/{cache}/append", pair(at=9), "free"), 409, "cache_position")
    assert call(cache_server, "POST", f"/caches/{cache}/append", pair(at=2), "free").status == 200
    assert lengths(cache_server, cache) == [3, 0]


def test_a_retry_may_have_the_other_encoding(cache_server, cache):
    """The payload is what was parsed: JSON and safetensors of equal tensors are the same call."""
    k, v = kv(1, seed=7)
    document = {"k": k[0].tolist(), "v": v[0].tolist(), "layer": 1}
    first = call(cache_server, "POST", f"/caches/{cache}/append", document, "encoded")
    assert first.json == {"length": 1}
    assert call(cache_server, "POST", f"/caches/{cache}/append", pair(seed=7, layer=1), "encoded").json == first.json
    other = message({"k": k[0], "v": torch.zeros_like(v[0])}, layer=1)
    problem(call(cache_server, "POST", f"/caches/{cache}/append", other, "encoded"), 422, "idempotency_key_reused")
    assert lengths(cache_server, cache) == [2, 1]
