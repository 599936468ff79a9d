"""The gradients that `flashpoint.torch.attention` gets from a real server equal those of autograd in float64."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
from flashpoint.torch import attention
from tests.support.oracle import answer, close, tensors


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        yield client


def leaves(*given):
    return [t.clone().requires_grad_() for t in given]


def test_gradients_for_every_input_through_o_and_lse(client):
    q, k, v, do = tensors(2, 4, 19, 8)
    k, v = k[:, :2], v[:, :2]
    mask, sinks, dlse = tensors(4, 19, 19, n=1, seed=1)[0], torch.tensor([0.1, 2.0, -1.0, 0.0]), do[..., 0]
    inputs = leaves(q, k, v, mask, sinks)
    o, lse = attention(*inputs[:3], client=client, attn_mask=inputs[3], sinks=inputs[4], causal=True, return_lse=True)
    ((o * do).sum() + (lse * dlse).sum()).backward()
    names = ("q", "k", "v", "attn_mask", "sinks")
    expected = answer(dict(zip(names, inputs, strict=True)) | {"do": do, "dlse": dlse}, {"causal": True})
    close(o.detach(), expected["o"])
    for name, actual in zip(names, inputs, strict=True):
        assert actual.grad.dtype == actual.dtype
        close(actual.grad, expected["d" + name], bound=4e-6)


def test_only_what_is_needed_is_asked_for(client):
    q, k, v, do = tensors(1, 2, 9, 8)
    v.requires_grad_()
    (attention(q, k, v, client=client) * do).sum().backward()
    close(v.grad, answer({"q": q, "k": k, "v": v, "do": do}, {})["dv"])
    assert q.grad is None


def test_lse_alone_can_be_derived(client):
    q, k, v, _ = tensors(1, 2, 9, 8)
    (q,) = leaves(q)
    attention(q, k, v, client=client, return_lse=True)[1].sum().backward()
    through_lse = {"do": torch.zeros_like(q), "dlse": torch.ones_like(q[..., 0])}
    close(q.grad, answer({"q": q, "k": k, "v": v} | through_lse, {})["dq"])


def test_dropout_keeps_the_forwards_seed(client):
    """o is linear in v, so do·o = dv·v if and only if forward and backward drop the same weights."""
    q, k, v, do = tensors(1, 2, 33, 8)
    v.requires_grad_()
    o, meta = attention(q, k, v, client=client, dropout_p=0.5, with_meta=True)
    (o * do).sum().backward()
    assert meta.seed is not None
    torch.testing.assert_close((v.grad * v).sum(), (o * do).sum(), rtol=1e-5, atol=1e-5)


def test_a_second_derivative_raises(client):
    q, k, v, _ = tensors(1, 1, 5, 8)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, k, v, client=client).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second-order"):
        dq.sum().backward()


def test_without_gradients_it_is_the_clients_call(client):
    q, k, v, _ = tensors(1, 2, 9, 8)
    with torch.no_grad():
        o = attention(q.requires_grad_(), k, v, client=client)
    assert not o.requires_grad
    assert torch.equal(o, client.attention(q, k, v))


def test_an_input_without_a_gradient_must_not_want_one(client):
    q, k, v, _ = tensors(1, 2, 9, 8)
    with pytest.raises(flashpoint.InvalidInputError, match="alibi_slopes"):
        attention(q, k, v, client=client, alibi_slopes=torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("other", [flashpoint.AsyncClient("http://127.0.0.1:9"), None])
def test_the_client_must_be_a_client(other, wanted):
    q, k, v, _ = tensors(1, 2, 9, 8)
    with pytest.raises(flashpoint.InvalidInputError, match="client: must be a Client, or a list of Clients"):
        attention(q.requires_grad_(wanted), k, v, client=other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_have_half_gradients(client, dtype):
    q, k, v, do = tensors(1, 2, 17, 16, dtype=dtype)
    inputs = leaves(q, k, v)
    (attention(*inputs, client=client) * do).sum().backward()
    expected = answer({"q": q, "k": k, "v": v, "do": do}, {})
    for name, actual in zip(("dq", "dk", "dv"), inputs, strict=True):
        assert actual.grad.dtype == dtype
        close(actual.grad, expected[name], bound=2**-8 if dtype == torch.float16 else 2**-6)


def test_any_view_is_sent(client):
    """Views are sent by value: a column of one row, with any stride, and a view whose negation torch has deferred."""
    q, lengths = torch.randn(1, 2, 8, 16), torch.tensor([[5, 8]])
    expected = client.attention(-q, q, q, kv_lengths=torch.tensor([5]))
    assert torch.equal(client.attention(torch._neg_view(q), q, q, kv_lengths=lengths[:, 0]), expected)


def test_scales_of_none_have_a_backward(client):
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    given = ({}, {"k_scale": None, "v_scale": None})
    actual = [torch.autograd.grad(attention(q, q, q, client=client, **none).sum(), q)[0] for none in given]
    assert torch.equal(*actual)
