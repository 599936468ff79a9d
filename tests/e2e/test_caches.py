"""KV caches over HTTP equal a model in numpy and the kernel library; keys, quotas and lost engines."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import signal

import numpy as np
import pytest
import torch

from flashpoint_kernels import attention, dequantize, quantize
from tests.support.caches import (
    HK,
    HQ,
    KEYS,
    LAYERS,
    SHAPE,
    D,
    attended,
    bearer,
    client,
    created,
    kv,
    posted,
    started,
    write_keys,
)
from tests.support.messages import JSON, ask, message, normal, post, problem
from tests.support.servers import wait_for


@pytest.fixture(scope="module")
def shared_server(start_server, tmp_path_factory):
    """Return a server that tests share; a test deletes its caches."""
    return started(start_server, tmp_path_factory)


@pytest.fixture(scope="module")
def hurt(start_server, tmp_path_factory):
    """Start a server whose engine is killed and whose keys change."""
    return started(start_server, tmp_path_factory)


OPTIONS = [
    {}, {"causal": True}, {"window": [5, 2]}, {"causal": True, "window": [1100, 0], "return_lse": True},
    {"softcap": 3.0}, {"scale": -0.3}, {"causal": True, "causal_alignment": "top_left"},
    {"dropout_p": 0.3, "dropout_seed": 5}, {"backend": "reference"}, {"backend": "tiled", "causal": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_options_mean_over_caches_what_they_mean_over_tensors(shared_server, layout, options):
    old, new, batch = 1100, 5, 2
    k, v = kv(old + new, 3, batch)
    q = normal(batch, HQ, new, D, seed=4)
    ids = created(shared_server, count=batch)
    assert (
        attended(
            shared_server,
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
    answer = attended(shared_server, tensors, caches=ids, layout=layout, **named)
    assert answer.status == 200, answer
    o = answer.tensors["o"]
    if layout == "bshd":
        o = o.transpose(1, 2)
    if layout == "thd":
        o = o.view(batch, new, HQ, D).transpose(1, 2)
    expected = attention(q, k, v, **{"backend": "tiled", **options})
    torch.testing.assert_close(o, expected[0] if options.get("return_lse") else expected, rtol=1e-4, atol=1e-5)
    posted(shared_server, "/caches/delete", {"caches": ids})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_caches_take_and_give_the_dtype_of_q(shared_server, dtype):
    (k, v), q = kv(1030, 21), normal(1, HQ, 2, D, seed=22)
    (one,) = created(shared_server, dtype=str(dtype).removeprefix("torch."), layers=1)
    body = message({"k": k[0, :, :1000].half(), "v": v[0, :, :1000].half()})
    assert post(shared_server, f"/caches/{one}/append", body, **bearer("alice")).json == {"length": 1000}
    (described,) = ask(shared_server, "/caches", **bearer("alice")).json["caches"]
    assert described["bytes"] == 1024 + 512 + 1024 * HK * (D + D + 8)
    rest = {"k": k[:, :, 1000:1002], "v": v[:, :, 1000:1002]}
    stands = {}
    for name, t in (("k", k), ("v", v)):
        values, scale = quantize(torch.cat((t[:, :, :1000].half().float(), t[:, :, 1000:1002]), 2), dtype)
        stands |= {name: values, f"{name}_scale": scale}
    for options in ({"causal": True}, {"softcap": 5.0, "causal": True}):  # read in chunks, and as pages
        answer = attended(shared_server, {"q": q, **rest}, caches=[one], at=[1000], **options)
        expected = attention(q, **stands, **options)
        torch.testing.assert_close(answer.tensors["o"], expected, rtol=1e-4, atol=1e-5)
    half = {name: t.bfloat16() for name, t in {"q": q, **rest}.items()}
    answer = attended(shared_server, half, caches=[one], at=[1000])
    assert answer.tensors["o"].dtype == torch.bfloat16
    torch.testing.assert_close(answer.tensors["o"].float(), attention(q, **stands), rtol=2e-2, atol=2e-2)
    text = {"q": q[0].tolist(), "caches": [one], "dtype": "float16"}
    assert posted(shared_server, "/attention", {**text, "q": [q[0].tolist()]}).status == 200
    assert attended(shared_server, {"q": q, **rest}, caches=[one], at=[1000]).status == 200  # as before bfloat16
    moved = ask(shared_server, f"/caches/{one}/tensors", **bearer("alice")).tensors
    for name in ("k", "v"):
        assert torch.equal(moved[name], dequantize(stands[name], stands[f"{name}_scale"]))
        assert torch.equal(moved[f"{name}_scale"], stands[f"{name}_scale"])
    refused = attended(shared_server, {name: t.double() for name, t in {"q": q, **rest}.items()}, caches=[one])
    assert problem(refused, 422, "invalid_request")["errors"][0]["loc"] == ["q"]
    with client(shared_server) as alice, alice.cache(**SHAPE, dtype="int8") as cache:
        actual = cache.attention(q, *(t[:, :, :2] for t in (k, v)))
        assert actual.dtype == q.dtype
        assert cache.tensors(0, like=q)[0].dtype == torch.float32
    posted(shared_server, "/caches/delete", {"caches": [one]})


def test_masks_slopes_sinks_and_lengths_count_positions_in_the_cache(shared_server):
    lengths, batch = [700, 3], 2
    k, v = kv(702, 5, batch)
    ids = created(shared_server, count=batch)
    for one, length, n in zip(ids, lengths, range(batch), strict=True):
        body = message({"k": k[n, :, :length], "v": v[n, :, :length]})
        assert post(shared_server, f"/caches/{one}/append", body, **bearer("alice")).json == {"length": length}
    q, new = normal(batch, HQ, 2, D, seed=6), [t[:, :, :2] for t in kv(2, 7, batch)]
    extra = {
        "attn_mask": normal(batch, 1, 2, 710, seed=8), "alibi_slopes": normal(HQ, seed=9).abs(),
        "sinks": normal(HQ, seed=10), "q_lengths": torch.tensor([2, 0]),
    }  # fmt: skip
    answer = attended(shared_server, {"q": q, "k": new[0], "v": new[1], **extra}, caches=ids, causal=True)
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
    short = attended(shared_server, {"q": q, "attn_mask": extra["attn_mask"][..., :650]}, caches=ids)
    problem(short, 422, "invalid_request")
    posted(shared_server, "/caches/delete", {"caches": ids})


@pytest.mark.parametrize("shape", [(2, HQ, 1, 11), (2, 1, 1, 20)])
def test_a_block_masks_blocks_count_from_the_caches_first_token(shared_server, shape):
    """Columns after the length are ignored; too few columns are refused by name."""
    k, v = kv(700, 5, 2)
    ids, q = created(shared_server, count=2), normal(2, HQ, 1, D, seed=6)
    for n, one in enumerate(ids):
        body = message({"k": k[n], "v": v[n]})
        assert post(shared_server, f"/caches/{one}/append", body, **bearer("alice")).json == {"length": 700}
    blocks = normal(*shape, seed=7) > 0
    options = {"causal": True, "window": (500, 0), "block_size": (16, 64)}
    answer = attended(shared_server, {"q": q, "block_mask": blocks}, caches=ids, **options)
    expected = attention(q, k, v, block_mask=blocks[..., :11], backend="tiled", **options)
    torch.testing.assert_close(answer.tensors["o"], expected, rtol=1e-4, atol=1e-5)
    short = attended(shared_server, {"q": q, "block_mask": blocks[..., :10]}, caches=ids, **options)
    assert problem(short, 422, "invalid_request")["errors"][0]["loc"] == ["block_mask"]
    posted(shared_server, "/caches/delete", {"caches": ids})


def test_bits_do_not_depend_on_how_a_cache_was_filled_forked_or_cut_nor_on_neighbours(shared_server):
    count = 1500
    k, v = kv(count, 11)
    q = normal(1, HQ, 1, D, seed=12)
    whole, pieces = created(shared_server, count=2)

    def append(one, start, stop, **options):
        body = message({"k": k[0, :, start:stop], "v": v[0, :, start:stop]}, **options)
        assert post(shared_server, f"/caches/{one}/append", body, **bearer("alice")).status == 200

    append(whole, 0, count)
    for start, stop in ((0, 7), (7, 900), (900, 1300)):
        append(pieces, start, stop)
    append(pieces, 5, 40)  # and cut again
    posted(shared_server, f"/caches/{pieces}/truncate", {"length": 1300})
    append(pieces, 1300, count, at=1300)
    (forked,) = (c["id"] for c in posted(shared_server, "/caches/fork", {"caches": [pieces]}).json["caches"])
    append(pieces, 0, 3)
    alone = attended(shared_server, {"q": q}, caches=[whole]).tensors["o"]
    assert torch.equal(attended(shared_server, {"q": q}, caches=[forked]).tensors["o"], alone)
    beside = attended(shared_server, {"q": q.repeat(3, 1, 1, 1)}, caches=[pieces, forked, whole]).tensors["o"]
    assert torch.equal(beside[1:2], alone)
    assert torch.equal(beside[2:], alone)
    posted(shared_server, "/caches/delete", {"caches": [whole, pieces, forked]})


def test_forks_that_are_asked_together_or_at_the_same_time_have_the_bits_of_a_call_without_a_cache(shared_server):
    """This holds for one call over all forks, and for calls of many threads that meet in the engine."""
    k, v = (normal(1, HK, 1030, D, seed=seed) for seed in (1, 2))
    q, own_k, own_v = (normal(8, heads, 2, D, seed=3 + heads) for heads in (HQ, HK, HK))
    expected = []
    with client(shared_server) as alice:
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


def test_ids_of_others_and_guessed_ones_are_not_found(shared_server):
    (one,) = created(shared_server)
    other = one[:-3] + ("AAA" if one[-3:] != "AAA" else "BBB")
    for name, guess in (("bob", one), ("alice", other), ("alice", "c"), ("alice", "x" * 5000), ("alice", one + "A")):
        actual = [
            ask(shared_server, f"/caches/{guess}", **bearer(name)),
            ask(shared_server, f"/caches/{guess}", "DELETE", **bearer(name)),
            posted(shared_server, f"/caches/{guess}/truncate", {"length": 0}, name),
            posted(shared_server, f"/caches/{guess}/renew", {}, name),
            posted(shared_server, "/caches/fork", {"caches": [guess]}, name),
            posted(shared_server, "/caches", {**SHAPE, "beside": guess}, name),
            attended(shared_server, {"q": normal(1, HQ, 1, D)}, name, caches=[guess]),
            ask(shared_server, f"/caches/{guess}/tensors", **bearer(name)),
        ]  # fmt: skip
        assert [(answer.status, answer.json["code"]) for answer in actual] == [(404, "cache_not_found")] * len(actual)
    assert ask(shared_server, "/caches", **bearer("bob")).json == {"caches": []}
    assert ask(shared_server, f"/caches/{one}", **bearer("alice")).status == 200
    posted(shared_server, "/caches/delete", {"caches": [one]})


def test_a_key_is_held_to_its_quota_and_all_keys_to_the_memory(shared_server):
    (one,) = created(shared_server, "carol")
    k, v = kv(8000, 13)
    problem(
        post(shared_server, f"/caches/{one}/append", message({"k": k, "v": v}), **bearer("carol")), 429, "key_limit"
    )
    (two,) = created(shared_server)
    problem(
        post(
            shared_server,
            f"/caches/{two}/append",
            message({"k": k.repeat(1, 1, 5, 1), "v": v.repeat(1, 1, 5, 1)}),
            **bearer("alice"),
        ),
        413,
        "work_too_large",
    )
    assert post(shared_server, f"/caches/{two}/append", message({"k": k, "v": v}), **bearer("alice")).status == 200
    filled, answer = [], None
    for _ in range(9):
        answer = posted(shared_server, "/caches", {**SHAPE, "layers": 1, "max_length": 8000})
        filled += [cache["id"] for cache in answer.json.get("caches", [])]
    problem(answer, 429, "cache_memory")
    posted(shared_server, "/caches/delete", {"caches": [two, *filled]})
    posted(shared_server, "/caches/delete", {"caches": [one]}, "carol")
    info = ask(shared_server, "/info", **bearer("alice")).json["caches"]
    assert info["limit_bytes"] == 8 << 20


def test_refusals_name_the_field(shared_server):
    (one,), (wide,) = created(shared_server), created(shared_server, kv_heads=HK + 1)
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
        answer = attended(shared_server, tensors, **options)
        errors = problem(answer, 422, "invalid_request")["errors"]
        assert errors[0]["loc"] == [field], (options, errors)
    do = {"do": q, "q": q, "k": k, "v": v}
    for options in ({"at": -1}, {"at": 1 << 31}, {"at": 10**30}, {"layer": 10**30}):
        answer = post(shared_server, f"/caches/{one}/append", message({"k": k, "v": v}, **options), **bearer("alice"))
        assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == list(options), options
    for query, field in (("layr=0", "layr"), ("layer=", "layer"), ("layer=9", "layer")):
        answer = ask(shared_server, f"/caches/{one}/tensors?{query}", **bearer("alice"))
        assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == [field], query
    answer = ask(shared_server, f"/caches/{one}/tensors", accept="application/json", **bearer("alice"))
    assert "application/vnd.safetensors" in problem(answer, 406, "not_acceptable")["detail"]
    answer = ask(shared_server, f"/caches/{one}/tensors", accept="application/json, */*;q=0.1", **bearer("alice"))
    assert set(answer.tensors) == {"k", "v"}
    for path in ("/attention/grad", "/verify"):
        answer = post(shared_server, path, message(do, caches=[one]), **bearer("alice"))
        assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == ["caches"], path
    posted(shared_server, "/caches/delete", {"caches": [one, wide]})


def test_a_head_that_was_seen_before_means_the_same_only_to_its_owner(shared_server):
    """The server caches the result of reading a head; other keys, options or lengths do not get it."""
    (one,), (k, v), q = created(shared_server), kv(3, 0), normal(1, HQ, 3, D, seed=1)
    body = message({"q": q, "k": k, "v": v}, caches=[one], causal=True)
    for length in (3, 6):
        answer = post(shared_server, "/attention", body, **bearer("alice"))
        assert (answer.status, json.loads(answer.metadata["lengths"])) == (200, [length])
    problem(post(shared_server, "/attention", body, **bearer("bob")), 404, "cache_not_found")
    keys, values = (torch.cat([tensor, tensor], 2) for tensor in (k, v))
    for query, options in ((q, {}), (q[:, :, :1], {}), (q, {"causal": True}), (q[:, :, :1], {"scale": 0.5})):
        for _ in range(2):  # the second time from the cache
            answer = post(
                shared_server, "/attention", message({"q": query}, caches=[one], **options), **bearer("alice")
            )
            expected = attention(query, keys, values, **options)
            torch.testing.assert_close(answer.tensors["o"], expected, rtol=1e-4, atol=1e-5)
    posted(shared_server, "/caches/delete", {"caches": [one]})


@pytest.mark.slow
def test_tensors_are_read_as_one_request(start_server, tmp_path):
    """The key and the queue have room for only one request. The key pays for the bytes."""
    limits = {"rights": ["attention"], "concurrent": 1, "bytes_per_second": 200_000}
    digest = hashlib.sha256(KEYS["alice"].encode()).hexdigest()
    file = tmp_path / "keys.toml"
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in {"sha256": digest, **limits}.items())
    file.write_text("[alice]\n" + "".join(lines))
    server = start_server(queue_limit=1, api_keys_file=file)
    (one,), (k, v) = created(server), kv(1000, 0)
    assert post(server, f"/caches/{one}/append", message({"k": k, "v": v}), **bearer("alice")).status == 200
    answers = []

    def read():
        answers.append(ask(server, f"/caches/{one}/tensors", **bearer("alice")))
        return answers[-1].status == 200

    wait_for(read, lambda: answers[-1], seconds=10)  # the key must pay for the tokens first
    assert "bytes a second" in problem(ask(server, f"/caches/{one}", **bearer("alice")), 429, "key_limit")["detail"]


@pytest.mark.slow
def test_a_server_without_memory_has_no_caches_and_saves_nothing(start_server):
    server = start_server(cache_bytes=0)
    problem(post(server, "/caches", json.dumps(SHAPE).encode(), JSON), 404, "not_found")
    q, (k, v) = normal(1, HQ, 9, D), kv(9, 0)
    problem(post(server, "/attention", message({"q": q, "k": k, "v": v}, save=True)), 413, "work_too_large")
    problem(ask(server, "/saved"), 404, "not_found")


@pytest.mark.slow
def test_removing_a_key_frees_its_caches(hurt):
    created(hurt, "bob", max_length=1024)

    def held_bytes():
        return ask(hurt, "/info", **bearer("alice")).json["caches"]["bytes"]

    wait_for(lambda: held_bytes() > 0, lambda: "nobody is told of the cache")
    write_keys(hurt.keys_file, ["alice", "carol"])
    wait_for(lambda: held_bytes() == 0, lambda: "the cache is still held")
    write_keys(hurt.keys_file, KEYS)
    wait_for(lambda: ask(hurt, "/caches", **bearer("bob")).status == 200, lambda: "the key is not back")


def test_a_cache_of_an_engine_that_died_is_lost_and_one_of_no_engine_never_was(hurt):
    (one,) = created(hurt)
    (pid,) = hurt.children("engine.process")
    os.kill(pid, signal.SIGKILL)

    def lost():
        answers = [ask(hurt, f"/caches/{one}", **bearer("alice")) for _ in range(6)]  # from both HTTP processes
        with contextlib.suppress(KeyError):
            return all(answer.json["code"] == "cache_lost" for answer in answers)

    wait_for(lost, lambda: "the cache is not lost")
    problem(ask(hurt, f"/caches/{one}", **bearer("alice")), 410, "cache_lost")
    wait_for(lambda: ask(hurt, "/health/ready").status == 200, lambda: "not ready again")
    problem(attended(hurt, {"q": normal(1, HQ, 1, D)}, caches=[one]), 410, "cache_lost")
    problem(ask(hurt, f"/caches/{one}", **bearer("bob")), 404, "cache_not_found")


@pytest.mark.parametrize("options", [{"dropout_p": 0.5, "dropout_seed": 1}, {"causal": True}], ids=str)
def test_a_sequence_without_queries_may_have_a_cache_cut_to_its_first_kept_token(shared_server, options):
    one, two = created(shared_server, count=2, layers=1, keep=1)
    for count in (1024, 1, 1):
        k, v = kv(count, 0)
        assert post(shared_server, f"/caches/{two}/append", message({"k": k, "v": v}), **bearer("alice")).status == 200
    posted(shared_server, f"/caches/{two}/truncate", {"length": 1024})
    k, v = (torch.cat([t, t]) for t in kv(1, 1))
    tensors = {"q": normal(2, HQ, 1, D), "k": k, "v": v, "q_lengths": torch.tensor([1, 0])}
    answer = attended(shared_server, tensors, caches=[one, two], **options)
    assert answer.status == 200, answer.body
    assert not answer.tensors["o"][1].any()
    posted(shared_server, "/caches/delete", {"caches": [one, two]})


def test_a_repeated_write_has_the_seed_of_the_first(shared_server):
    """Other keys, layers and caches get other seeds."""
    (one, two), (k, v), seeds = created(shared_server, count=2), kv(3, 0), []
    for key, cache, layer in (("a", one, 0), ("a", one, 0), ("b", one, 0), ("a", two, 0), ("c", two, 0), ("c", one, 1)):
        tensors = {"q": normal(1, HQ, 3, D), "k": k, "v": v}
        headers = {"idempotency_key": key}
        answer = attended(shared_server, tensors, headers=headers, caches=[cache], layer=layer, dropout_p=0.5)
        seeds.append((json.loads(answer.metadata["dropout_seed"]), answer.tensors["o"].tolist()))
    assert seeds[0] == seeds[1]
    assert len({seed for seed, _ in seeds}) == 5
    posted(shared_server, "/caches/delete", {"caches": [one, two]})


def test_errors_name_the_field_of_an_id_and_a_key_belongs_to_its_kind_of_call(shared_server):
    (one,) = created(shared_server, layers=1)
    for path, document, field in (
        ("/caches/fork", {"caches": [one], "free": ["nobody"]}, "free.0"),
        ("/caches", {**SHAPE, "beside": "nobody"}, "beside"),
    ):
        answer = post(shared_server, path, json.dumps(document).encode(), JSON, **bearer("alice"))
        assert [error["loc"] for error in problem(answer, 404, "cache_not_found")["errors"]] == [[field]], path
    made = [
        post(shared_server, path, json.dumps(document).encode(), JSON, idempotency_key="both", **bearer("alice"))
        for path, document in (("/caches", SHAPE), ("/caches/fork", {"caches": [one]}), ("/caches", SHAPE))
    ]
    first, fork, again = ([cache["id"] for cache in answer.json["caches"]] for answer in made)
    assert first == again != fork
    posted(shared_server, "/caches/delete", {"caches": [one, *first, *fork]})
