"""Key weights over KV caches are the sums of the formula's probabilities, for each position of each cache."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
from tests.support.messages import JSON, message, normal, post
from tests.support.oracle import answer

HEADS, GROUP, DIM, VALUE_DIM = 2, 3, 16, 24
LENGTHS = (1500, 40)  # of the caches before the call: two chunks, and a part of one
NEW = 5  # queries and new tokens of each sequence


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        yield client


def filled(client, lengths=LENGTHS, dtype="float32", **more):
    """Return caches with tokens, and their keys and values as they are read: 8-bit ones times their scales."""
    kind = getattr(torch, dtype) if "16" in dtype else torch.float32
    made = client.caches(len(lengths), kv_heads=HEADS, head_dim=DIM, value_dim=VALUE_DIM, dtype=dtype, **more)
    for n, (cache, length) in enumerate(zip(made, lengths, strict=True)):
        k, v = (normal(HEADS, length, dim, seed=9 * n + i).to(kind) for i, dim in enumerate((DIM, VALUE_DIM)))
        cache.append(k, v)
    return made, kind


def query(kind, count=2, length=NEW):
    return normal(count, HEADS * GROUP, length, DIM, seed=3).to(kind)


def close(actual, expected):
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-6)


def expected(caches, q, sequence, **given):
    """Return the oracle's key weights (Hq, L) of one sequence over what its cache holds now."""
    k, v = caches[sequence].tensors(like=q)
    first = caches[sequence].length - k.shape[2]  # dropped tokens receive nothing
    weights = answer({"q": q[sequence : sequence + 1], "k": k, "v": v, **given.pop("tensors", {})}, given)
    return torch.nn.functional.pad(weights["key_weights"][0], (first, 0))


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_of_every_dtype_with_new_tokens_and_without(client, dtype, backend):
    caches, kind = filled(client, dtype=dtype)
    q, (k, v) = query(kind), (normal(2, HEADS, NEW, dim, seed=8).to(kind) for dim in (DIM, VALUE_DIM))
    plain = [cache.fork() for cache in caches]
    found = client.attention(q, k, v, caches=caches, causal=True, return_key_weights=True, backend=backend)
    (o, weights), alone = found, client.attention(q, k, v, caches=plain, causal=True, backend=backend)
    assert torch.equal(o, alone), "key weights changed the bits of o"
    assert weights.shape == (2, HEADS * GROUP, max(LENGTHS) + NEW)
    again = client.attention(q, caches=caches, causal=True, return_lse=True, return_key_weights=True, backend=backend)
    assert again[1].shape == (2, HEADS * GROUP, NEW)
    assert torch.equal(again[2], weights)
    rough = {"rtol": 2e-2, "atol": 1e-3} if "8" in dtype and backend != "cpu" else {"rtol": 1e-4, "atol": 2e-6}
    for n, length in enumerate(LENGTHS):
        assert torch.equal(weights[n, :, length + NEW :], torch.zeros_like(weights[n, :, length + NEW :]))
        one = expected(caches, q, n, causal=True)
        torch.testing.assert_close(weights[n, :, : length + NEW].double(), one, **rough)


OPTIONS = {
    "window": {"causal": True, "window": (600, 0)},
    "window on both sides": {"window": (30, 2)},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "top left": {"causal": True, "causal_alignment": "top_left"},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "block mask": {"block_size": (16, 48), "causal": True},
}


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("name", [*OPTIONS, "mask", "float mask", "slopes", "sinks"])
def test_of_every_option(client, name, backend):
    caches, kind = filled(client, (1500, 1100))
    q, options, shared, own = query(kind), OPTIONS.get(name, {}), {}, [{}, {}]
    columns = 1500
    if name == "block mask":
        shared["block_mask"] = normal(1, HEADS * GROUP, 1, -(-columns // 48), seed=4) > 0
        own = [{"block_mask": shared["block_mask"][..., : -(-n // 48)]} for n in (1500, 1100)]
    if "mask" in name and name != "block mask":
        mask = normal(2, 1, NEW, columns, seed=4)
        shared["attn_mask"] = mask if name == "float mask" else mask > 0
        own = [{"attn_mask": shared["attn_mask"][n : n + 1, ..., :length]} for n, length in enumerate((1500, 1100))]
    if name == "slopes":
        shared["alibi_slopes"] = normal(2, HEADS * GROUP, seed=4).abs() / 100
        own = [{"alibi_slopes": shared["alibi_slopes"][n : n + 1]} for n in range(2)]
    if name == "sinks":
        shared["sinks"] = normal(HEADS * GROUP, seed=4)
        own = [shared, shared]
    _, weights = client.attention(q, caches=caches, return_key_weights=True, backend=backend, **shared, **options)
    for n, length in enumerate((1500, 1100)):
        close(weights[n, :, :length], expected(caches, q, n, tensors=own[n], **options))


def test_of_a_long_prefill_whose_heads_run_in_parts(client):
    (cache,), _ = filled(client, (400,))
    q, k, v = (normal(1, heads, 700, dim, seed=n) for n, (heads, dim) in
               enumerate(((HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, VALUE_DIM))))  # fmt: skip
    given = {"alibi_slopes": normal(HEADS * GROUP, seed=4).abs() / 100, "sinks": normal(HEADS * GROUP, seed=5)}
    _, weights = cache.attention(q, k, v, return_key_weights=True, **given)
    close(weights[0], expected([cache], q, 0, tensors=given))


def test_a_single_query_with_a_window(client):
    caches, kind = filled(client)
    q = query(kind, length=1)
    for window in ((700, 0), (0, 0), (5000, 3)):
        _, weights = client.attention(q, caches=caches, causal=True, window=window, return_key_weights=True)
        for n, length in enumerate(LENGTHS):
            close(weights[n, :, :length], expected(caches, q, n, causal=True, window=window))


def test_of_packed_and_padded_queries(client):
    caches, kind = filled(client)
    q = query(kind)
    cut = torch.tensor([0, 2, 2 + NEW])
    packed = torch.cat([q[0, :, :2], q[1]], 1).transpose(0, 1).contiguous()
    _, weights = client.attention(
        packed, caches=caches, layout="thd", cu_seqlens_q=cut, causal=True, return_key_weights=True
    )
    assert weights.shape == (2, HEADS * GROUP, max(LENGTHS))
    close(weights[0], expected(caches, q[:, :, :2], 0, causal=True))
    close(weights[1, :, : LENGTHS[1]], expected(caches, q, 1, causal=True))
    padded = client.attention(
        q.transpose(1, 2).contiguous(), caches=caches, layout="bshd", q_lengths=torch.tensor([2, 0]), causal=True,
        return_key_weights=True,
    )[1]  # fmt: skip
    assert torch.equal(padded[0], weights[0])
    assert not padded[1].any()


@pytest.mark.parametrize("rank", [2, 3])
def test_of_one_head(client, rank):
    (cache,) = client.caches(1, kv_heads=1, head_dim=DIM, dtype="float32")
    q, k, v = (normal(*(1,) * (rank - 2), 7, DIM, seed=n) for n in range(3))
    for step in range(2):
        o, weights = cache.attention(q, k, v, causal=True, return_key_weights=True)
        assert o.shape == q.shape
        assert weights.shape == (*q.shape[:-2], 7 * (step + 1))
    held = [t[0] if rank == 3 else t[0, 0] for t in cache.tensors(like=q)]
    close(weights, answer({"q": q, "k": held[0], "v": held[1]}, {"causal": True})["key_weights"])


def test_dropped_tokens_an_empty_cache_and_at(client):
    caches, kind = filled(client, (3000, 2600), keep=600)
    q, (k, v) = query(kind), (normal(2, HEADS, NEW, dim, seed=8) for dim in (DIM, VALUE_DIM))
    client.attention(q, k, v, caches=caches, causal=True, window=(500, 0))  # drops the tokens before its window
    _, weights = client.attention(q, caches=caches, causal=True, window=(500, 0), return_key_weights=True)
    for n, length in enumerate((3005, 2605)):
        close(weights[n, :, :length], expected(caches, q, n, causal=True, window=(500, 0)))
    (empty,) = client.caches(1, kv_heads=HEADS, head_dim=DIM, value_dim=VALUE_DIM, dtype="float32")
    o, weights = empty.attention(q[:1], return_key_weights=True)
    assert weights.shape == (1, HEADS * GROUP, 0)
    assert not o.any()
    for at in (0, 3, 1):
        _, weights = empty.attention(q[:1], k[:1], v[:1], at=at, return_key_weights=True)
        close(weights[0], expected([empty], q, 0))
        assert weights.shape[2] == at + NEW


def test_json_and_the_async_client(client, server):
    caches, kind = filled(client, (30,))
    q = query(kind, count=1)
    _, weights = client.attention(q, caches=caches, return_key_weights=True)
    body = {"q": q.tolist(), "caches": [caches[0].id], "return_key_weights": True}
    reply = post(server, "/attention", json.dumps(body).encode(), JSON)
    assert reply.status == 200, reply.body
    assert set(reply.json) >= {"o", "key_weights", "lengths"}
    assert "lse" not in reply.json
    np.testing.assert_array_equal(np.asarray(reply.json["key_weights"], np.float32), weights.numpy())

    async def ask():
        async with flashpoint.AsyncClient(server.url) as other:
            return await other.attention(q, caches=[caches[0].id], return_key_weights=True)

    assert torch.equal(asyncio.run(ask())[1], weights)


def test_a_repeated_write_has_the_same_key_weights(client, server):
    caches, kind = filled(client, (30,))
    q, k, v = query(kind, count=1), *(normal(1, HEADS, NEW, dim, seed=8) for dim in (DIM, VALUE_DIM))
    body = message({"q": q, "k": k, "v": v}, caches=[caches[0].id], return_key_weights=True)
    first, second = (post(server, "/attention", body, Idempotency_Key="one") for _ in range(2))
    assert first.tensors["key_weights"].shape == (1, HEADS * GROUP, 30 + NEW)
    for name, t in first.tensors.items():
        assert torch.equal(second.tensors[name], t)
    assert set(first.tensors) == {"o", "key_weights"}


def test_a_lost_cache_is_named(client):
    caches, kind = filled(client)
    caches[1].delete()
    with pytest.raises(flashpoint.CacheError, match=r"does not exist") as caught:
        client.attention(query(kind), caches=caches, return_key_weights=True)
    assert "caches.1" in str(caught.value.errors)


def test_callers_of_one_cache_get_their_own_or_are_told_to_send_again(client):
    (cache,), kind = filled(client, (40,))
    q, (k, v) = query(kind, count=1), (normal(1, HEADS, NEW, dim, seed=8) for dim in (DIM, VALUE_DIM))

    def ask(n):
        try:
            return client.attention(q, *((k, v) if n % 2 else ()), caches=[cache.id], causal=True,
                                    return_key_weights=True)[1]  # fmt: skip
        except flashpoint.FlashpointError as error:
            return error.code

    with ThreadPoolExecutor(8) as threads:
        every = list(threads.map(ask, range(40)))
    refused = {one for one in every if isinstance(one, str)}
    assert refused <= {"cache_position"}
    assert any(torch.is_tensor(one) for one in every)
    for weights in every:
        if torch.is_tensor(weights):
            torch.testing.assert_close(weights.sum(2), torch.full((1, HEADS * GROUP), float(NEW)), rtol=1e-4, atol=0)
    cache.refresh()
    writes = sum(torch.is_tensor(one) for one in every[1::2])
    assert cache.length == 40 + NEW * writes, "a refused call wrote its tokens"
