"""`triton`, `cpu` and `tiled` serve head dimensions up to 576, forward and backward."""

import math

import pytest
import safetensors.torch
import torch

import flashpoint
from tests.support.messages import message, normal, post


@pytest.mark.parametrize("backend", ["triton", "cpu", "tiled"])
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (576, 512)])
def test_wide_heads_are_answered_with_their_gradients(gated, backend, dim, value_dim):
    t = {"q": normal(1, 2, 5, dim), "k": normal(1, 1, 9, dim, seed=1), "v": normal(1, 1, 9, value_dim, seed=2)}
    answer = post(gated.server, "/attention", message(t, backend=backend))
    assert (answer.status, answer.headers["x-backend"]) == (200, backend)
    q, k, v = (x.double() for x in t.values())
    right = (q @ k.mT / math.sqrt(dim)).softmax(-1) @ v
    torch.testing.assert_close(safetensors.torch.load(answer.body)["o"].double(), right, rtol=1e-5, atol=1e-5)
    do = normal(1, 2, 5, value_dim, seed=3)
    answer = post(gated.server, "/attention/grad", message(t | {"do": do}, backend=backend))
    assert (answer.status, answer.headers["x-backend"]) == (200, backend)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    right = (q @ k.mT / math.sqrt(dim)).softmax(-1) @ v
    found = safetensors.torch.load(answer.body)
    for name, expected in zip(("dq", "dk", "dv"), torch.autograd.grad(right, leaves, do.double()), strict=True):
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("call", "more"), [("/attention", {}), ("/attention/grad", {"do": normal(1, 1, 2, 577)})])
def test_wider_heads_are_for_the_reference_alone(server, call, more):
    t = {name: normal(1, 1, 2, 577, seed=n) for n, name in enumerate("qkv")} | more
    refused = post(server, call, message(t, backend="tiled"))
    assert refused.status == 422
    assert "D and Dv up to 576" in refused.json["detail"]
    assert post(server, call, message(t)).headers["x-backend"] == "reference"


def test_a_cache_has_wide_heads(server):
    q, k, v = (normal(1, heads, 7, dim, seed=heads + dim) for heads, dim in ((2, 576), (1, 576), (1, 512)))
    sizes = {"kv_heads": 1, "head_dim": 576, "value_dim": 512}
    with flashpoint.Client(server.url, timeout=240) as client, client.cache(**sizes) as cache:
        over_cache = cache.attention(q, k, v, causal=True)
        assert torch.equal(over_cache, client.attention(q, k, v, causal=True))
