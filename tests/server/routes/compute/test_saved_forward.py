"""Gradients of a saved forward have the same bits as those of a call that sends all tensors.

An invalid call about a saved forward gets 422, and its first error names the field that is wrong or missing.
"""

import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_contract.options import GRADS
from tests.support.caches import bearer
from tests.support.messages import JSON, message, normal, post, problem
from tests.support.saved import HK, HQ, D, S, delete, forward, gradient, qkv, saved_of


def packed(tensors):
    """Return tensors of layout bhsd in layout thd: the sequences of the batch, one after another."""
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
def test_gradients_have_the_bits_of_the_call_that_sends_everything(saved_server, case):
    extra, options = CASES[case]
    tensors = (packed(qkv()) if options.get("layout") == "thd" else qkv()) | extra
    answer = forward(saved_server, tensors, save=True, return_lse=True, **options)
    one, o, lse = saved_of(answer), answer.tensors["o"], answer.tensors["lse"]
    unsaved = forward(saved_server, tensors, return_lse=True, **options)
    assert torch.equal(o, unsaved.tensors["o"])
    assert torch.equal(lse, unsaved.tensors["lse"])
    do, dlse = normal(*o.shape, seed=21), normal(*lse.shape, seed=22)
    float_mask = case == "mask"
    grads = [name for name in GRADS if name[1:] in "qkv" or float_mask]
    whole = gradient(saved_server, tensors | {"do": do, "dlse": dlse, "o": o, "lse": lse}, grads=grads, **options)
    assert whole.status == 200, whole
    for _ in range(2):  # a gradient does not delete the saved forward
        recalled = gradient(saved_server, {"do": do, "dlse": dlse}, saved=one, grads=grads)
        assert recalled.status == 200, recalled
        assert recalled.metadata == whole.metadata
        assert recalled.tensors.keys() == whole.tensors.keys() == set(grads)
        assert all(torch.equal(recalled.tensors[name], whole.tensors[name]) for name in grads)
    assert delete(saved_server, one).status == 204
    problem(gradient(saved_server, {"do": do}, saved=one), 404, "saved_not_found")


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_gradients_agree_with_float64(saved_server, backend):
    tensors = qkv(3)
    one = saved_of(forward(saved_server, tensors, save=True, causal=True))
    do = normal(2, HQ, S, D, seed=31)
    answer = gradient(saved_server, {"do": do}, saved=one, backend=backend, grads=["dk", "dq"])
    assert answer.headers["x-backend"] == backend
    assert answer.tensors.keys() == {"dk", "dq"}
    exact = {name: t.double().requires_grad_() for name, t in tensors.items()}
    k, v = (exact[name].repeat_interleave(HQ // HK, 1) for name in "kv")
    scores = (exact["q"] @ k.mT / D**0.5).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    (scores.softmax(-1) @ v).backward(do.double())
    for name in ("dk", "dq"):
        torch.testing.assert_close(answer.tensors[name].double(), exact[name[1:]].grad, rtol=1e-4, atol=1e-5)
    delete(saved_server, one)


def test_a_seed_that_the_server_picks_is_kept(saved_server):
    tensors = qkv()
    answer = forward(saved_server, tensors, save=True, dropout_p=0.4, return_lse=True)
    one, seed = saved_of(answer), int(answer.metadata["dropout_seed"])
    again = forward(saved_server, tensors, dropout_p=0.4, dropout_seed=seed, return_lse=True)
    assert torch.equal(answer.tensors["o"], again.tensors["o"])
    do = normal(2, HQ, S, D, seed=1)
    whole = gradient(saved_server, tensors | again.tensors | {"do": do}, dropout_p=0.4, dropout_seed=seed)
    assert torch.equal(gradient(saved_server, {"do": do}, saved=one).tensors["dq"], whole.tensors["dq"])
    delete(saved_server, one)


def test_json_saves_and_recalls(saved_server):
    tensors = qkv(batch=1, length=3)
    body = {name: t.tolist() for name, t in tensors.items()}
    saved = post(saved_server, "/attention", json.dumps({**body, "save": True}).encode(), JSON, **bearer("alice")).json
    assert saved.keys() == {"o", "dtype", "backend", "kernel", "saved"}  # lse was not requested
    do = normal(1, HQ, 3, D, seed=2)
    request = {"do": do.tolist(), "saved": saved["saved"], "grads": ["dv"]}
    answer = post(saved_server, "/attention/grad", json.dumps(request).encode(), JSON, **bearer("alice")).json
    whole = gradient(saved_server, tensors | {"do": do}, grads=["dv"])
    torch.testing.assert_close(torch.tensor(answer["dv"]), whole.tensors["dv"], rtol=1e-5, atol=1e-6)
    delete(saved_server, saved["saved"])


def test_options_at_their_defaults_ask_for_nothing(saved_server):
    tensors = qkv()
    plain = forward(saved_server, tensors)
    for options in ({"save": False}, {"saved": None}):
        assert forward(saved_server, tensors, **options).metadata == plain.metadata
    do = {"do": normal(2, HQ, S, D)}
    assert gradient(saved_server, tensors | do, save=False, saved=None).status == 200


def test_refusals_name_the_field(saved_server):
    tensors, do = qkv(), {"do": normal(2, HQ, S, D)}
    one = saved_of(forward(saved_server, tensors, save=True))
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
        answer = post(saved_server, path, message(given, **options), **bearer("alice"))
        errors = problem(answer, 422, "invalid_request")["errors"]
        assert errors[0]["loc"] == [field], (path, options, errors)
    delete(saved_server, one)
