"""A server saves forwards and computes their gradients over HTTP: bits, options, owners, memory, lost engines."""

import json
import os
import signal

import pytest
import torch

from flashpoint_contract.options import GRADS
from tests.support.caches import KEYS, bearer, started, wait_both, write_keys
from tests.support.messages import JSON, ask, message, normal, post, problem, read_metrics
from tests.support.servers import wait_for

HQ, HK, S, D = 4, 2, 24, 16
QUOTA = 100_000


def started_small(start_server, tmp_path_factory, **settings):
    return started(start_server, tmp_path_factory, cache_bytes=1 << 20, quota=QUOTA, **settings)


@pytest.fixture(scope="module")
def shared_server(start_server, tmp_path_factory):
    """Return a server that tests share; a test deletes its saved forwards."""
    return started_small(start_server, tmp_path_factory)


def forward(server, tensors, name="alice", **options):
    return post(server, "/attention", message(tensors, **options), **bearer(name))


def gradient(server, tensors, name="alice", **options):
    return post(server, "/attention/grad", message(tensors, **options), **bearer(name))


def saved_of(answer):
    assert answer.status == 200, answer
    return answer.metadata["saved"]


def delete(server, one, name="alice"):
    return ask(server, f"/saved/{one}", "DELETE", **bearer(name))


def qkv(seed=0, batch=2, length=S):
    shapes = {"q": (batch, HQ, length, D), "k": (batch, HK, length, D), "v": (batch, HK, length, D)}
    return {name: normal(*shape, seed=seed + n) for n, (name, shape) in enumerate(shapes.items())}


def packed(tensors):
    """Return the tensors in layout thd."""
    return {name: t.transpose(1, 2).flatten(0, 1).contiguous() for name, t in tensors.items()}


LENGTHS = {"cu_seqlens_q": torch.tensor([0, 5, 2 * S]), "cu_seqlens_k": torch.tensor([0, 30, 2 * S])}
CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True, "window": [9, 0], "softcap": 3.0, "scale": 0.3}),
    "dropout": ({}, {"dropout_p": 0.3, "dropout_seed": 11}),
    "padded": ({"q_lengths": torch.tensor([3, S]), "kv_lengths": torch.tensor([S, 7])}, {"causal": True}),
    "thd": (LENGTHS, {"layout": "thd", "causal": True}),
    "mask": (
        {"attn_mask": normal(1, HQ, S, S, seed=7), "sinks": normal(HQ, seed=8), "alibi_slopes": normal(HQ).abs()},
        {"backend": "tiled"},
    ),
    "bool mask": ({"attn_mask": normal(2, 1, S, S, seed=7) > 0}, {}),
    "reference": ({}, {"backend": "reference", "causal": True}),
    "non-deterministic": ({}, {"deterministic": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_have_the_bits_of_the_call_that_sends_everything(shared_server, case):
    extra, options = CASES[case]
    tensors = (packed(qkv()) if options.get("layout") == "thd" else qkv()) | extra
    answer = forward(shared_server, tensors, save=True, return_lse=True, **options)
    one, o, lse = saved_of(answer), answer.tensors["o"], answer.tensors["lse"]
    unsaved = forward(shared_server, tensors, return_lse=True, **options)
    assert torch.equal(o, unsaved.tensors["o"])
    assert torch.equal(lse, unsaved.tensors["lse"])
    do, dlse = normal(*o.shape, seed=21), normal(*lse.shape, seed=22)
    float_mask = case == "mask"
    grads = [name for name in GRADS if name[1:] in "qkv" or float_mask]
    whole = gradient(shared_server, tensors | {"do": do, "dlse": dlse, "o": o, "lse": lse}, grads=grads, **options)
    assert whole.status == 200, whole
    for _ in range(2):  # reading does not delete
        recalled = gradient(shared_server, {"do": do, "dlse": dlse}, saved=one, grads=grads)
        assert recalled.status == 200, recalled
        assert recalled.metadata == whole.metadata
        assert recalled.tensors.keys() == whole.tensors.keys() == set(grads)
        assert all(torch.equal(recalled.tensors[name], whole.tensors[name]) for name in grads)
    assert delete(shared_server, one).status == 204
    problem(gradient(shared_server, {"do": do}, saved=one), 404, "saved_not_found")


@pytest.mark.parametrize("backend", ["torch", "tiled"])
def test_gradients_agree_with_float64(shared_server, backend):
    tensors = qkv(3)
    one = saved_of(forward(shared_server, tensors, save=True, causal=True))
    do = normal(2, HQ, S, D, seed=31)
    answer = gradient(shared_server, {"do": do}, saved=one, backend=backend, grads=["dk", "dq"])
    assert answer.headers["x-backend"] == backend
    assert answer.tensors.keys() == {"dk", "dq"}
    exact = {name: t.double().requires_grad_() for name, t in tensors.items()}
    k, v = (exact[name].repeat_interleave(HQ // HK, 1) for name in "kv")
    scores = (exact["q"] @ k.mT / D**0.5).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    (scores.softmax(-1) @ v).backward(do.double())
    for name in ("dk", "dq"):
        torch.testing.assert_close(answer.tensors[name].double(), exact[name[1:]].grad, rtol=1e-4, atol=1e-5)
    delete(shared_server, one)


def test_a_seed_that_the_server_picks_is_kept(shared_server):
    tensors = qkv()
    answer = forward(shared_server, tensors, save=True, dropout_p=0.4, return_lse=True)
    one, seed = saved_of(answer), int(answer.metadata["dropout_seed"])
    again = forward(shared_server, tensors, dropout_p=0.4, dropout_seed=seed, return_lse=True)
    assert torch.equal(answer.tensors["o"], again.tensors["o"])
    do = normal(2, HQ, S, D, seed=1)
    whole = gradient(shared_server, tensors | again.tensors | {"do": do}, dropout_p=0.4, dropout_seed=seed)
    assert torch.equal(gradient(shared_server, {"do": do}, saved=one).tensors["dq"], whole.tensors["dq"])
    delete(shared_server, one)


def test_json_saves_and_recalls(shared_server):
    tensors = qkv(batch=1, length=3)
    body = {name: t.tolist() for name, t in tensors.items()}
    saved = post(shared_server, "/attention", json.dumps({**body, "save": True}).encode(), JSON, **bearer("alice")).json
    assert saved.keys() == {"o", "dtype", "backend", "kernel", "saved"}  # lse was not requested
    do = normal(1, HQ, 3, D, seed=2)
    request = {"do": do.tolist(), "saved": saved["saved"], "grads": ["dv"]}
    answer = post(shared_server, "/attention/grad", json.dumps(request).encode(), JSON, **bearer("alice")).json
    whole = gradient(shared_server, tensors | {"do": do}, grads=["dv"])
    torch.testing.assert_close(torch.tensor(answer["dv"]), whole.tensors["dv"], rtol=1e-5, atol=1e-6)
    delete(shared_server, saved["saved"])


def test_options_at_their_defaults_ask_for_nothing(shared_server):
    tensors = qkv()
    plain = forward(shared_server, tensors)
    for options in ({"save": False}, {"saved": None}):
        assert forward(shared_server, tensors, **options).metadata == plain.metadata
    do = {"do": normal(2, HQ, S, D)}
    assert gradient(shared_server, tensors | do, save=False, saved=None).status == 200


def test_what_is_saved_is_listed_described_and_counted(shared_server):
    tensors = qkv()
    before = read_info(shared_server)
    ids = [saved_of(forward(shared_server, tensors, save=True)) for _ in range(3)]
    size = sum(4 * t.numel() for t in tensors.values()) + 4 * 2 * HQ * S * (D + 1) + 1024
    wait_for(lambda: read_info(shared_server)["saved"] == before["saved"] + 3, lambda: "the three were not counted")
    assert read_info(shared_server)["saved_bytes"] == before["saved_bytes"] + 3 * size
    listed = ask(shared_server, "/saved", **bearer("alice")).json["saved"]
    assert [one["id"] for one in listed if one["id"] in ids] == ids
    one = ask(shared_server, f"/saved/{ids[1]}", **bearer("alice")).json
    assert one.pop("expires_in_s") <= 600
    shapes = {name: list(t.shape) for name, t in tensors.items()}
    shapes |= {"o": [2, HQ, S, D], "lse": [2, HQ, S]}
    assert one == {"id": ids[1], "dtype": "float32", "shapes": shapes, "bytes": size, "ttl_s": 600.0}
    assert ask(shared_server, "/saved", **bearer("bob")).json == {"saved": []}
    for one in ids:
        delete(shared_server, one)
    assert not {one["id"] for one in ask(shared_server, "/saved", **bearer("alice")).json["saved"]} & {*ids}


def read_info(server):
    return ask(server, "/info", **bearer("alice")).json["caches"]


def test_refusals_name_the_field(shared_server):
    tensors, do = qkv(), {"do": normal(2, HQ, S, D)}
    one = saved_of(forward(shared_server, tensors, save=True))
    lse = normal(2, HQ, S)
    eight = {n: tensors[n].to(torch.int8) for n in "kv"} | {n: torch.tensor(0.1) for n in ("k_scale", "v_scale")}
    cases = [
        ("/attention", tensors, {"save": 3}, "save"), ("/attention", tensors, {"saved": one}, "saved"),
        ("/attention", tensors, {"save": True, "saved": one}, "saved"),
        ("/attention", {"q": tensors["q"]}, {"save": True, "caches": ["c"]}, "save"),
        ("/attention", tensors | eight, {"save": True}, "k_scale"),
        ("/attention", tensors, {"save": True, "cazual": True}, "cazual"),
        ("/attention/grad", tensors | do, {"save": True}, "save"),
        ("/attention/grad", do | {"q": tensors["q"]}, {"saved": one}, "q"),
        ("/attention/grad", do | {"lse": lse}, {"saved": one}, "lse"),
        ("/attention/grad", do, {"saved": one, "causal": True}, "causal"),
        ("/attention/grad", do, {"saved": one, "caches": ["c"]}, "caches"),
        ("/attention/grad", do, {"saved": one, "dropout_seed": 1}, "dropout_seed"),
        ("/attention/grad", do, {"saved": one, "grads": ["dsinks"]}, "grads"),
        ("/attention/grad", do, {"saved": one, "backend": "fast"}, "backend"),
        ("/attention/grad", {"dlse": lse}, {"saved": one}, "do"),
        ("/attention/grad", {"do": do["do"].half()}, {"saved": one}, "do"),
        ("/attention/grad", {"do": do["do"][:1]}, {"saved": one}, "do"),
        ("/attention/grad", do, {"saved": 5}, "saved"),
        ("/verify", tensors, {"save": True}, "save"), ("/verify", tensors | do, {"saved": one}, "saved"),
    ]  # fmt: skip
    for path, given, options, field in cases:
        answer = post(shared_server, path, message(given, **options), **bearer("alice"))
        errors = problem(answer, 422, "invalid_request")["errors"]
        assert errors[0]["loc"] == [field], (path, options, errors)
    delete(shared_server, one)


def test_ids_of_others_and_guessed_ones_are_not_found(shared_server):
    do = {"do": normal(2, HQ, S, D)}
    one = saved_of(forward(shared_server, qkv(), save=True))
    cache = post(shared_server, "/caches", b"{}", JSON, **bearer("alice")).json["caches"][0]["id"]
    other = one[:-3] + ("AAA" if one[-3:] != "AAA" else "BBB")
    guesses = [("bob", one), *(("alice", guess) for guess in (other, "s", "x" * 5000, one + "A", "s" + cache[1:]))]
    for name, guess in guesses:
        answers = [
            gradient(shared_server, do, name, saved=guess), ask(shared_server, f"/saved/{guess}", **bearer(name)),
            delete(shared_server, guess, name),
        ]  # fmt: skip
        assert [(answer.status, answer.json["code"]) for answer in answers] == [(404, "saved_not_found")] * 3
    problem(forward(shared_server, {"q": qkv()["q"]}, caches=["c" + one[1:]]), 404, "cache_not_found")
    assert gradient(shared_server, do, saved=one).status == 200
    delete(shared_server, one)
    ask(shared_server, f"/caches/{cache}", "DELETE", **bearer("alice"))


def test_memory_is_the_callers_with_that_of_caches(shared_server):
    tensors = qkv()
    ids = [saved_of(forward(shared_server, tensors, "carol", save=True)) for _ in range(2)]
    problem(forward(shared_server, tensors, "carol", save=True), 429, "key_limit")
    assert forward(shared_server, tensors, "carol").status == 200
    delete(shared_server, ids[0], "carol")
    cache = post(
        shared_server, "/caches", b'{"max_length": 100, "kv_heads": 1, "head_dim": 4}', JSON, **bearer("carol")
    )
    problem(forward(shared_server, tensors, "carol", save=True), 429, "key_limit")
    ask(shared_server, f"/caches/{cache.json['caches'][0]['id']}", "DELETE", **bearer("carol"))
    ids[0] = saved_of(forward(shared_server, tensors, "carol", save=True))
    for one in ids:
        delete(shared_server, one, "carol")
    problem(forward(shared_server, qkv(length=2048), save=True), 413, "work_too_large")
    ids = []
    while (answer := forward(shared_server, qkv(length=200), save=True)).status == 200:
        ids.append(saved_of(answer))
    assert len(ids) == 3
    refusal = problem(answer, 429, "cache_memory")
    assert answer.headers["retry-after"] == "1", refusal
    do = {"do": normal(2, HQ, 200, D)}
    assert gradient(shared_server, do, saved=ids[0]).status == 200  # live forwards are never evicted
    for one in ids:
        delete(shared_server, one)
    wait_for(lambda: forward_and_delete(shared_server), lambda: "there was no memory again")


def forward_and_delete(server):
    """Return whether this HTTP process knows that memory is free again."""
    answer = forward(server, qkv(length=200), save=True)
    return answer.status == 200 and delete(server, saved_of(answer)).status == 204


@pytest.mark.slow
def test_a_saved_forward_expires(start_server):
    server = start_server(saved_ttl=0.2)
    answer = post(server, "/attention", message(qkv(), save=True))
    one = answer.metadata["saved"]
    do = {"do": normal(2, HQ, S, D)}
    wait_for(lambda: ask(server, f"/saved/{one}").status == 410, lambda: "it did not expire")
    problem(post(server, "/attention/grad", message(do, saved=one)), 410, "saved_lost")
    problem(ask(server, f"/saved/{one}", "DELETE"), 410, "saved_lost")
    assert ask(server, "/saved").json == {"saved": []}

    def counted():
        return [v for n, v in read_metrics(server).items() if n.startswith("flashpoint_saved_forwards{")]

    wait_for(lambda: counted() == [0.0], lambda: "the metric did not fall")


@pytest.mark.slow
def test_what_an_engine_held_is_lost_with_it_and_with_its_owner(start_server, tmp_path_factory):
    server = started_small(start_server, tmp_path_factory)
    do = {"do": normal(2, HQ, S, D)}
    one, other = (saved_of(forward(server, qkv(), name, save=True)) for name in ("alice", "bob"))
    write_keys(server.keys_file, ["alice", "carol"], QUOTA)
    wait_for(lambda: read_info(server)["saved"] == 1, lambda: "bob's was not freed")
    write_keys(server.keys_file, KEYS, QUOTA)
    wait_for(lambda: ask(server, "/info", **bearer("bob")).status == 200, lambda: "bob did not come back")
    wait_for(lambda: gradient(server, do, "bob", saved=other).status == 410, lambda: "bob's was not lost")
    os.kill(server.engine_pid, signal.SIGKILL)

    def lost():
        answers = [gradient(server, do, saved=one) for _ in range(6)]  # from both HTTP processes
        return all(answer.status == 410 for answer in answers)

    wait_for(lost, lambda: "it is not lost")
    problem(delete(server, one), 410, "saved_lost")
    wait_both(server)
    one = saved_of(forward(server, qkv(), save=True))
    assert gradient(server, do, saved=one).status == 200
