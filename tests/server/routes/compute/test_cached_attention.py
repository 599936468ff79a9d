"""Attention over KV caches equals attention over their tensors. An invalid call gets an error that names the field."""

import concurrent.futures
import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import numpy as np
import torch

from flashpoint_kernels import attention, dequantize, quantize
from tests.support import oracle
from tests.support.caches import (
    HK,
    HQ,
    LAYERS,
    SHAPE,
    D,
    appended,
    attended,
    bearer,
    client,
    created,
    kv,
    lengths,
    posted,
)
from tests.support.messages import ask, message, normal, post, problem

OPTIONS = [
    {}, {"causal": True}, {"window": [5, 2]}, {"causal": True, "window": [1100, 0], "return_lse": True},
    {"softcap": 3.0}, {"scale": -0.3}, {"causal": True, "causal_alignment": "top_left"},
    {"dropout_p": 0.3, "dropout_seed": 5}, {"backend": "reference"}, {"backend": "tiled", "causal": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_options_mean_over_caches_what_they_mean_over_tensors(cache_server, layout, options):
    old, new, batch = 1100, 5, 2
    k, v = kv(old + new, 3, batch)
    q = normal(batch, HQ, new, D, seed=4)
    ids = created(cache_server, count=batch)
    assert (
        attended(
            cache_server,
            {"q": k[:, :1, :old].expand(-1, HQ, -1, -1), "k": k[:, :, :old], "v": v[:, :, :old]},
            caches=ids,
        ).status
        == 200
    )
    tensors = {"q": q, "k": k[:, :, old:], "v": v[:, :, old:]}
    named = dict(options)
    if layout == "bshd":
        tensors = {name: t.transpose(1, 2) for name, t in tensors.items()}
    if layout == "thd":
        tensors = {name: t.transpose(1, 2).flatten(0, 1) for name, t in tensors.items()}
        tensors["cu_seqlens_q"] = torch.tensor([0, new, 2 * new])
    answer = attended(cache_server, tensors, caches=ids, layout=layout, **named)
    assert answer.status == 200, answer
    o = answer.tensors["o"]
    if layout == "bshd":
        o = o.transpose(1, 2)
    if layout == "thd":
        o = o.view(batch, new, HQ, D).transpose(1, 2)
    expected = attention(q, k, v, **{"backend": "tiled", **options})
    torch.testing.assert_close(o, expected[0] if options.get("return_lse") else expected, rtol=1e-4, atol=1e-5)
    posted(cache_server, "/caches/delete", {"caches": ids})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_caches_take_and_give_the_dtype_of_q(cache_server, dtype):
    (k, v), q = kv(1030, 21), normal(1, HQ, 2, D, seed=22)
    (one,) = created(cache_server, dtype=str(dtype).removeprefix("torch."), layers=1)
    body = message({"k": k[0, :, :1000].half(), "v": v[0, :, :1000].half()})
    assert post(cache_server, f"/caches/{one}/append", body, **bearer("alice")).json == {"length": 1000}
    (described,) = ask(cache_server, "/caches", **bearer("alice")).json["caches"]
    assert described["bytes"] == 1024 + 512 + 1024 * HK * (D + D + 8)
    rest = {"k": k[:, :, 1000:1002], "v": v[:, :, 1000:1002]}
    stands = {}
    for name, t in (("k", k), ("v", v)):
        values, scale = quantize(torch.cat((t[:, :, :1000].half().float(), t[:, :, 1000:1002]), 2), dtype)
        stands |= {name: values, f"{name}_scale": scale}
    for options in ({"causal": True}, {"softcap": 5.0, "causal": True}):
        answer = attended(cache_server, {"q": q, **rest}, caches=[one], at=[1000], **options)
        expected = attention(q, **stands, **options)
        torch.testing.assert_close(answer.tensors["o"], expected, rtol=1e-4, atol=1e-5)
    half = {name: t.bfloat16() for name, t in {"q": q, **rest}.items()}
    answer = attended(cache_server, half, caches=[one], at=[1000])
    assert answer.tensors["o"].dtype == torch.bfloat16
    torch.testing.assert_close(answer.tensors["o"].float(), attention(q, **stands), rtol=2e-2, atol=2e-2)
    text = {"q": q[0].tolist(), "caches": [one], "dtype": "float16"}
    assert posted(cache_server, "/attention", {**text, "q": [q[0].tolist()]}).status == 200
    assert attended(cache_server, {"q": q, **rest}, caches=[one], at=[1000]).status == 200  # replaces bfloat16 tokens
    moved = ask(cache_server, f"/caches/{one}/tensors", **bearer("alice")).tensors
    for name in ("k", "v"):
        assert torch.equal(moved[name], dequantize(stands[name], stands[f"{name}_scale"]))
        assert torch.equal(moved[f"{name}_scale"], stands[f"{name}_scale"])
    refused = attended(cache_server, {name: t.double() for name, t in {"q": q, **rest}.items()}, caches=[one])
    assert problem(refused, 422, "invalid_request")["errors"][0]["loc"] == ["q"]
    with client(cache_server) as alice, alice.cache(**SHAPE, dtype="int8") as cache:
        actual = cache.attention(q, *(t[:, :, :2] for t in (k, v)))
        assert actual.dtype == q.dtype
        assert cache.tensors(0, like=q)[0].dtype == torch.float32
    posted(cache_server, "/caches/delete", {"caches": [one]})


def test_masks_slopes_sinks_and_lengths_count_positions_in_the_cache(cache_server):
    lengths, batch = [700, 3], 2
    k, v = kv(702, 5, batch)
    ids = created(cache_server, count=batch)
    for one, length, n in zip(ids, lengths, range(batch), strict=True):
        body = message({"k": k[n, :, :length], "v": v[n, :, :length]})
        assert post(cache_server, f"/caches/{one}/append", body, **bearer("alice")).json == {"length": length}
    q, new = normal(batch, HQ, 2, D, seed=6), [t[:, :, :2] for t in kv(2, 7, batch)]
    extra = {
        "attn_mask": normal(batch, 1, 2, 710, seed=8), "alibi_slopes": normal(HQ, seed=9).abs(),
        "sinks": normal(HQ, seed=10), "q_lengths": torch.tensor([2, 0]),
    }  # fmt: skip
    answer = attended(cache_server, {"q": q, "k": new[0], "v": new[1], **extra}, caches=ids, causal=True)
    assert json.loads(answer.metadata["lengths"]) == [702, 3]
    whole = [torch.cat((t[:1, :, :700], own[:1]), 2) for t, own in zip((k, v), new, strict=True)]
    own = {
        "attn_mask": extra["attn_mask"][:1, ..., :702],
        "alibi_slopes": extra["alibi_slopes"],
        "sinks": extra["sinks"],
    }
    expected = attention(q[:1], *whole, causal=True, backend="tiled", **own)
    torch.testing.assert_close(answer.tensors["o"][:1], expected, rtol=1e-4, atol=1e-5)
    assert not answer.tensors["o"][1].any()
    short = attended(cache_server, {"q": q, "attn_mask": extra["attn_mask"][..., :650]}, caches=ids)
    problem(short, 422, "invalid_request")
    posted(cache_server, "/caches/delete", {"caches": ids})


@pytest.mark.parametrize("shape", [(2, HQ, 1, 11), (2, 1, 1, 20)])
def test_a_block_masks_blocks_count_from_the_caches_first_token(cache_server, shape):
    """The columns of a block mask count from the first token of a cache.

    Extra columns are ignored. Too few get an error that names block_mask.
    """
    k, v = kv(700, 5, 2)
    ids, q = created(cache_server, count=2), normal(2, HQ, 1, D, seed=6)
    for n, one in enumerate(ids):
        body = message({"k": k[n], "v": v[n]})
        assert post(cache_server, f"/caches/{one}/append", body, **bearer("alice")).json == {"length": 700}
    blocks = normal(*shape, seed=7) > 0
    options = {"causal": True, "window": (500, 0), "block_size": (16, 64)}
    answer = attended(cache_server, {"q": q, "block_mask": blocks}, caches=ids, **options)
    expected = attention(q, k, v, block_mask=blocks[..., :11], backend="tiled", **options)
    torch.testing.assert_close(answer.tensors["o"], expected, rtol=1e-4, atol=1e-5)
    short = attended(cache_server, {"q": q, "block_mask": blocks[..., :10]}, caches=ids, **options)
    assert problem(short, 422, "invalid_request")["errors"][0]["loc"] == ["block_mask"]
    posted(cache_server, "/caches/delete", {"caches": ids})


def test_bits_do_not_depend_on_how_a_cache_was_filled_forked_or_cut_nor_on_neighbours(cache_server):
    count = 1500
    k, v = kv(count, 11)
    q = normal(1, HQ, 1, D, seed=12)
    whole, pieces = created(cache_server, count=2)

    def append(one, start, stop, **options):
        body = message({"k": k[0, :, start:stop], "v": v[0, :, start:stop]}, **options)
        assert post(cache_server, f"/caches/{one}/append", body, **bearer("alice")).status == 200

    append(whole, 0, count)
    for start, stop in ((0, 7), (7, 900), (900, 1300)):
        append(pieces, start, stop)
    append(pieces, 5, 40)  # truncated by the next line
    posted(cache_server, f"/caches/{pieces}/truncate", {"length": 1300})
    append(pieces, 1300, count, at=1300)
    (forked,) = (c["id"] for c in posted(cache_server, "/caches/fork", {"caches": [pieces]}).json["caches"])
    append(pieces, 0, 3)
    alone = attended(cache_server, {"q": q}, caches=[whole]).tensors["o"]
    assert torch.equal(attended(cache_server, {"q": q}, caches=[forked]).tensors["o"], alone)
    beside = attended(cache_server, {"q": q.repeat(3, 1, 1, 1)}, caches=[pieces, forked, whole]).tensors["o"]
    assert torch.equal(beside[1:2], alone)
    assert torch.equal(beside[2:], alone)
    posted(cache_server, "/caches/delete", {"caches": [whole, pieces, forked]})


def test_forks_that_are_asked_together_or_at_the_same_time_have_the_bits_of_a_call_without_a_cache(cache_server):
    """One call over all forks of a cache, and concurrent calls over them, have the bits of calls without caches."""
    k, v = (normal(1, HK, 1030, D, seed=seed) for seed in (1, 2))
    q, own_k, own_v = (normal(8, heads, 2, D, seed=3 + heads) for heads in (HQ, HK, HK))
    expected = []
    with client(cache_server) as alice:
        for n in range(8):
            all_k, all_v = (np.concatenate(pair, 2) for pair in ((k, own_k[n : n + 1]), (v, own_v[n : n + 1])))
            expected.append(alice.attention(q[n : n + 1], all_k, all_v, causal=True))
        with alice.cache(kv_heads=HK, head_dim=D) as root:
            root.append(k, v)
            forks = alice.fork_caches([root] * 8)
            o, meta = alice.attention(q, own_k, own_v, caches=forks, causal=True, with_meta=True)
            assert (o == np.concatenate(expected)).all()
            assert meta.lengths == (1032,) * 8
            with concurrent.futures.ThreadPoolExecutor(8) as pool:

                def again(n):
                    own = slice(n, n + 1)
                    return forks[n].attention(q[own], own_k[own], own_v[own], at=1030, causal=True)

                for _ in range(5):
                    for actual, right in zip(pool.map(again, range(8)), expected, strict=True):
                        assert (actual == right).all()
            alice.delete_caches(forks)


def test_refusals_name_the_field(cache_server):
    (one,), (wide,) = created(cache_server), created(cache_server, kv_heads=HK + 1)
    q, (k, v) = normal(1, HQ, 1, D), kv(1, 1)
    two = {name: t.repeat(2, 1, 1, 1) for name, t in {"q": q, "k": k, "v": v}.items()}
    cases = [
        ({"q": q}, {"caches": [one], "layer": LAYERS}, "layer"), ({"q": q}, {"caches": []}, "caches"),
        ({"q": q}, {"caches": [one, one]}, "caches"), (two, {"caches": [one, one]}, "caches"),
        ({"q": q, "k": k}, {"caches": [one]}, "v"), ({"q": q}, {"caches": [one], "at": [0]}, "at"),
        ({"q": q, "kv_lengths": torch.tensor([1])}, {"caches": [one]}, "kv_lengths"),
        ({"q": q, "offset": torch.tensor([1])}, {"caches": [one]}, "offset"),
        ({"q": q.half(), "k": k.half(), "v": v.half()}, {"caches": [one]}, "q"),
        ({"q": two["q"]}, {"caches": [one, wide]}, "caches"),
        ({"q": q, "k": k, "v": v}, {"caches": [one], "at": [-1]}, "at"),
        ({"q": q, "k": k, "v": v}, {"layer": 1}, "layer"),
        ({"q": q}, {"caches": [one], "cazual": True}, "cazual"),
    ]  # fmt: skip
    for tensors, options, field in cases:
        answer = attended(cache_server, tensors, **options)
        errors = problem(answer, 422, "invalid_request")["errors"]
        assert errors[0]["loc"] == [field], (options, errors)
    do = {"do": q, "q": q, "k": k, "v": v}
    for options in ({"at": -1}, {"at": 1 << 31}, {"at": 10**30}, {"layer": 10**30}):
        answer = post(cache_server, f"/caches/{one}/append", message({"k": k, "v": v}, **options), **bearer("alice"))
        assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == list(options), options
    for query, field in (("layr=0", "layr"), ("layer=", "layer"), ("layer=9", "layer")):
        answer = ask(cache_server, f"/caches/{one}/tensors?{query}", **bearer("alice"))
        assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == [field], query
    answer = ask(cache_server, f"/caches/{one}/tensors", accept="application/json", **bearer("alice"))
    assert "application/vnd.safetensors" in problem(answer, 406, "not_acceptable")["detail"]
    answer = ask(cache_server, f"/caches/{one}/tensors", accept="application/json, */*;q=0.1", **bearer("alice"))
    assert set(answer.tensors) == {"k", "v"}
    for path in ("/attention/grad", "/verify"):
        answer = post(cache_server, path, message(do, caches=[one]), **bearer("alice"))
        assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == ["caches"], path
    posted(cache_server, "/caches/delete", {"caches": [one, wide]})


def test_a_head_that_was_seen_before_means_the_same_only_to_its_owner(cache_server):
    """The server caches the plan of a safetensors head, and reuses it for later requests with an equal head.

    The cached plan gives no access to caches of another API key, and answers follow the current length of the cache.
    """
    (one,), (k, v), q = created(cache_server), kv(3, 0), normal(1, HQ, 3, D, seed=1)
    body = message({"q": q, "k": k, "v": v}, caches=[one], causal=True)
    for length in (3, 6):
        answer = post(cache_server, "/attention", body, **bearer("alice"))
        assert (answer.status, json.loads(answer.metadata["lengths"])) == (200, [length])
    problem(post(cache_server, "/attention", body, **bearer("bob")), 404, "cache_not_found")
    keys, values = (torch.cat([tensor, tensor], 2) for tensor in (k, v))
    for query, options in ((q, {}), (q[:, :, :1], {}), (q, {"causal": True}), (q[:, :, :1], {"scale": 0.5})):
        for _ in range(2):  # the second request has the same head, so it uses the cached plan
            answer = post(cache_server, "/attention", message({"q": query}, caches=[one], **options), **bearer("alice"))
            expected = attention(query, keys, values, **options)
            torch.testing.assert_close(answer.tensors["o"], expected, rtol=1e-4, atol=1e-5)
    posted(cache_server, "/caches/delete", {"caches": [one]})


@pytest.mark.parametrize("options", [{"dropout_p": 0.5, "dropout_seed": 1}, {"causal": True}], ids=str)
def test_a_sequence_without_queries_may_have_a_cache_cut_to_its_first_kept_token(cache_server, options):
    one, two = created(cache_server, count=2, layers=1, keep=1)
    for count in (1024, 1, 1):
        k, v = kv(count, 0)
        assert post(cache_server, f"/caches/{two}/append", message({"k": k, "v": v}), **bearer("alice")).status == 200
    posted(cache_server, f"/caches/{two}/truncate", {"length": 1024})
    k, v = (torch.cat([t, t]) for t in kv(1, 1))
    tensors = {"q": normal(2, HQ, 1, D), "k": k, "v": v, "q_lengths": torch.tensor([1, 0])}
    answer = attended(cache_server, tensors, caches=[one, two], **options)
    assert answer.status == 200, answer.body
    assert not answer.tensors["o"][1].any()
    posted(cache_server, "/caches/delete", {"caches": [one, two]})


def test_a_repeated_write_has_the_seed_of_the_first(cache_server):
    """A write that is repeated with its idempotency key gets the same dropout seed; other writes get other seeds."""
    (one, two), (k, v), seeds = created(cache_server, count=2), kv(3, 0), []
    for key, cache, layer in (("a", one, 0), ("a", one, 0), ("b", one, 0), ("c", two, 0), ("d", one, 1)):
        tensors = {"q": normal(1, HQ, 3, D), "k": k, "v": v}
        headers = {"idempotency_key": key}
        answer = attended(cache_server, tensors, headers=headers, caches=[cache], layer=layer, dropout_p=0.5)
        seeds.append((json.loads(answer.metadata["dropout_seed"]), answer.tensors["o"].tolist()))
    assert seeds[0] == seeds[1]
    assert len({seed for seed, _ in seeds}) == 4
    posted(cache_server, "/caches/delete", {"caches": [one, two]})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_memory_that_had_another_owner_tells_nothing(cache_server, backend, masked):
    """A new cache in the memory of a deleted one never shows the deleted numbers.

    The deleted cache is full of NaN, so that an answer over the new cache would be NaN if an old number was read.
    """
    (one,) = created(cache_server)
    for layer in range(SHAPE["layers"]):
        assert (
            appended(cache_server, one, *(torch.full_like(t, torch.nan) for t in kv(3000, 1)), layer=layer).status
            == 200
        )
    posted(cache_server, "/caches/delete", {"caches": [one]})
    for reserved in (None, 1500):
        two = created(cache_server, "bob", count=2, max_length=reserved)
        k, v = kv(1033, 3, 2)
        q = normal(2, HQ, 3, D, seed=4)
        for n, length in enumerate((1030, 14)):
            assert (
                appended(cache_server, two[n], k[n : n + 1, :, :length], v[n : n + 1, :, :length], "bob").status == 200
            )
        new = [torch.stack((t[0, :, 1030:], t[1, :, 14:17])) for t in (k, v)]
        mask = {"attn_mask": torch.zeros(1, 1, 3, 1100)} if masked else {}
        tensors = {"q": q, "k": new[0], "v": new[1], **mask}
        answer = attended(cache_server, tensors, "bob", caches=two, causal=True, backend=backend)
        assert answer.status == 200, answer
        for n, length in enumerate((1033, 17)):
            whole = [t[n : n + 1, :, :length] for t in (k, v)]
            one = {"q": q[n : n + 1], "k": whole[0], "v": whole[1]}
            expected = oracle.answer(one, {"causal": True})["o"]
            actual = answer.tensors["o"][n : n + 1].double()
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            exported = ask(cache_server, f"/caches/{two[n]}/tensors", **bearer("bob")).tensors
            assert torch.equal(exported["k"], whole[0])
        posted(cache_server, "/caches/delete", {"caches": two}, "bob")


def test_a_mask_without_columns_fits_caches_without_tokens(cache_server):
    ids = created(cache_server, count=2)
    appended(cache_server, ids[1], *kv(5, 1))
    q, mask = normal(2, HQ, 3, D), torch.zeros(1, 1, 3, 0)
    answer = attended(cache_server, {"q": q[:1], "attn_mask": mask}, caches=ids[:1])
    assert (answer.status, answer.tensors["o"].any()) == (200, False)
    answer = attended(cache_server, {"q": q, "attn_mask": mask, "q_lengths": torch.tensor([3, 0])}, caches=ids)
    assert (answer.status, answer.tensors["o"].any()) == (200, False)
    answer = attended(cache_server, {"q": q, "attn_mask": mask}, caches=ids)
    assert problem(answer, 422, "invalid_request")["detail"] == "attn_mask: has 0 columns, but a cache has 5 tokens"
    posted(cache_server, "/caches/delete", {"caches": ids})


@pytest.mark.slow
def test_a_call_that_is_refused_for_its_mask_has_written_nothing(cache_server):
    (one,) = created(cache_server)
    appended(cache_server, one, *kv(5, 1))
    q, (k, v) = normal(1, HQ, 2, D), kv(2, 2)
    mask = torch.zeros(1, 1, 2, 6)  # 7 columns are needed
    answer = attended(cache_server, {"q": q, "k": k, "v": v, "attn_mask": mask}, caches=[one])
    assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == ["attn_mask"]
    assert lengths(cache_server, one) == [5, 0]
    (other,) = created(cache_server)
    two = {name: t.repeat(2, 1, 1, 1) for name, t in {"q": q, "k": k, "v": v}.items()}
    short = {
        **two,
        "attn_mask": mask[..., :4],
        "q_lengths": torch.tensor([0, 2]),
    }  # 4 columns are too few for the first cache, but its sequence has no queries
    assert attended(cache_server, short, caches=[one, other]).status == 200
    assert (lengths(cache_server, one), lengths(cache_server, other)) == ([5, 0], [2, 0])
    posted(cache_server, "/caches/delete", {"caches": [one, other]})
