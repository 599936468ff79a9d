"""Forwards saved on the server for a backward: requests, the fallback if memory is full, and when they are freed."""

import asyncio
import gc

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
import flashpoint.torch
from flashpoint_contract.saved import SAVED_OPTIONS
from tests.support.messages import normal
from tests.support.servers import wait_for
from tests.support.sockets import held_since

SHAPES = {"q": (1, 4, 24, 16), "k": (1, 2, 24, 16), "v": (1, 2, 24, 16)}


class Counted(flashpoint.Client):
    """A client that records (method, path, "save" or "saved" or "", size in bytes) of each request, in `calls`.

    "save" and "saved" name the option that the request has. `held()` returns the ids of the forwards that were saved
    on the server since this client was created, and have not been freed.
    """

    def __init__(self, server):
        super().__init__(server.url, timeout=240)
        self.calls, self.sent, self.held = [], [], held_since(server, "saved")

    def _call(self, call):
        head = bytes(call.body[0]) if call.body else b""
        about = next((name for name in ("saved", "save") if f'"{name}"'.encode() in head), "")
        self.calls.append((call.method, call.path.split("/s")[0], about, call.size))
        self.sent.append((call.path, about, call.timeout, call.headers.get("X-Priority")))
        return super()._call(call)

    def asked(self):
        """Return (path, "save" or "saved" or "") of each POST since `asked` was called last."""
        posts = [call[1:3] for call in self.calls if call[0] == "POST"]
        self.calls = []
        return posts


@pytest.fixture
def client(server):
    with Counted(server) as client:
        yield client
        assert_freed(client)


@pytest.fixture(scope="module")
def little(start_server):
    """Start a server whose memory for caches and saved forwards fits one small forward."""
    return start_server(cache_bytes=30_000)


@pytest.fixture
def full(little):
    with Counted(little) as client:
        yield client
        assert_freed(client)


def assert_freed(client):
    gc.collect()
    wait_for(lambda: not client.held(), client.held)


def qkv(seed=0, grad=False):
    tensors = [normal(*shape, seed=seed + n) for n, shape in enumerate(SHAPES.values())]
    return [t.requires_grad_() for t in tensors] if grad else tensors


def test_a_forward_is_saved_recalled_and_deleted(client):
    q, k, v = qkv()
    result = client.attention(q, k, v, causal=True, save=True)
    o, lse = client.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(result.o, o)
    assert result.lse is None
    do = normal(*o.shape, seed=9)
    expected = client.attention_grad(do, q, k, v, causal=True, o=o, lse=lse)
    actual, meta = client.attention_grad(do, saved=result.saved, with_meta=True)
    assert all(map(torch.equal, actual, expected))
    assert meta.backend == "cpu"
    (dk,) = client.attention_grad(do.numpy(), saved=result.saved, grads=("dk",), deterministic=True)
    assert np.array_equal(dk, expected[1].numpy())
    client.delete_saved(result.saved)
    client.delete_saved(result.saved)
    with pytest.raises(flashpoint.CacheError) as error:
        client.attention_grad(do, saved=result.saved)
    assert error.value.code == "saved_not_found"
    result, meta = client.attention(q, k, v, save=True, return_lse=True, with_meta=True)
    assert (result.saved, result.lse.shape) == (meta.saved, lse.shape)
    client.delete_saved(meta.saved)


@pytest.mark.parametrize("saved", [None, "", 7])
def test_only_a_saved_forward_can_be_freed(client, saved):
    with pytest.raises(flashpoint.InvalidInputError, match="saved: must be the result of attention with save=True"):
        client.delete_saved(saved)


def test_the_asyncio_twin_does_the_same(server, client):
    async def run():
        async with flashpoint.AsyncClient(server.url, timeout=240) as twin:
            q, k, v = (t.numpy() for t in qkv())
            result = await twin.attention(q, k, v, save=True)
            found = await twin.attention_grad(np.ones_like(result.o), saved=result.saved)
            await twin.delete_saved(result.saved)
            await twin.delete_saved(result.saved)
            return found, await twin.attention_grad(np.ones_like(result.o), q, k, v)

    found, expected = asyncio.run(run())
    assert all(map(np.array_equal, found, expected))
    assert not client.held()


@pytest.mark.slow
def test_without_memory_a_forward_runs_unsaved_at_once(full):
    q, k, v = qkv()
    first = full.attention(q, k, v, save=True)
    second, meta = full.attention(q, k, v, save=True, return_lse=True, with_meta=True)
    assert (second.saved, meta.saved, meta.retries) == (None, None, 0)
    assert torch.equal(first.o, second.o)
    large = full.attention(*(t.repeat(8, 1, 1, 1) for t in (q, k, v)), save=True)  # too large to ever fit
    assert large.saved is None
    full.delete_saved(first.saved)


def test_input_that_cannot_be_is_refused_by_name(client):
    q, k, v = qkv()
    for keywords in ({"save": 1}, {"save": True, "caches": ["c"]}):
        with pytest.raises(flashpoint.InvalidInputError, match="save"):
            client.attention(q, k, v, **keywords)
    refused = [(q, {"causal": True}, "causal"), (None, {"saved": 3}, "saved"), (q, {}, "q"), (None, {"lse": q}, "lse")]
    for first, keywords, name in refused:
        with pytest.raises(flashpoint.InvalidInputError, match=rf"\b{name}\b"):
            client.attention_grad(q, first, **{"saved": "an-id", **keywords})
    with pytest.raises(flashpoint.InvalidInputError, match="save"):
        flashpoint.torch.attention(*qkv(grad=True), client=[client, client], save=True)
    for entry in SAVED_OPTIONS:
        with pytest.raises(flashpoint.InvalidInputError, match=entry):
            flashpoint.sharded.attention([client, client], q, k, v, **{entry: True})
    assert client.asked() == []


def gradients(client, seed=0, **options):
    inputs = qkv(seed, grad=True)
    o, lse = flashpoint.torch.attention(*inputs, client=client, return_lse=True, causal=True, **options)
    return torch.autograd.grad((o * o).sum() + lse.sum(), inputs)


def test_torch_sends_do_alone_and_frees_the_forward(client):
    expected = gradients(client)
    sent = sum(call[3] for call in client.calls)
    client.calls = []
    assert all(map(torch.equal, gradients(client, save=True), expected))
    assert sum(call[3] for call in client.calls) < 0.7 * sent
    assert client.asked() == [("/attention", "save"), ("/attention/grad", "saved")]
    assert_freed(client)
    q, k, v = qkv()
    assert torch.is_tensor(
        flashpoint.torch.attention(q, k, v, client=client, save=True)
    )  # no input requires a gradient, so nothing is saved
    assert client.asked() == [("/attention", "")]
    actual = gradients(client, save=True, dropout_p=0.3, dropout_seed=3)
    assert all(map(torch.equal, actual, gradients(client, dropout_p=0.3, dropout_seed=3)))


def test_a_client_that_is_closed_after_the_backward_leaves_no_forward_behind(client, server):
    """`close` waits until the client's forwards are freed, because the freeing thread needs its connections."""
    with flashpoint.Client(server.url, timeout=240) as other:
        for _ in range(5):
            inputs = qkv(grad=True)
            flashpoint.torch.attention(*inputs, client=other, save=True).sum().backward()
    assert_freed(client)


def test_a_graph_that_is_kept_keeps_its_forward_and_one_that_is_dropped_frees_it(client):
    inputs = qkv(grad=True)
    o = flashpoint.torch.attention(*inputs, client=client, save=True)
    once = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    assert len(client.held()) == 1
    assert all(map(torch.equal, torch.autograd.grad(o.sum(), inputs), once))
    assert client.asked() == [("/attention", "save"), *[("/attention/grad", "saved")] * 2]
    assert_freed(client)
    del o
    dropped = flashpoint.torch.attention(*inputs, client=client, save=True)
    assert len(client.held()) == 1
    del dropped
    assert_freed(client)
    o = flashpoint.torch.attention(*inputs, client=client, save=True)
    (dq,) = torch.autograd.grad(o.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second-order"):
        dq.sum().backward()


def test_torch_sends_everything_where_the_forward_was_lost(client):
    expected = gradients(client, seed=5)
    client.asked()
    inputs = qkv(5, grad=True)
    o, lse = flashpoint.torch.attention(*inputs, client=client, return_lse=True, causal=True, save=True)
    client.delete_saved(*client.held())
    actual = torch.autograd.grad((o * o).sum() + lse.sum(), inputs)
    assert all(map(torch.equal, actual, expected))
    assert client.asked() == [("/attention", "save"), ("/attention/grad", "saved"), ("/attention/grad", "")]


@pytest.mark.slow
def test_torch_sends_everything_where_there_is_no_memory(full):
    expected = gradients(full)
    saved = full.attention(*qkv(), save=True)
    full.asked()
    assert all(map(torch.equal, gradients(full, save=True), expected))
    assert full.asked() == [("/attention", "save"), ("/attention/grad", "")]
    full.delete_saved(saved.saved)


@pytest.mark.slow
def test_jax_sends_do_alone_in_every_transformation_but_vmap(client):
    jax = pytest.importorskip("jax")
    from flashpoint.jax import attention

    q, k, v = (jax.numpy.asarray(t.numpy()) for t in qkv())

    def loss(q, k, v, **options):
        o, lse = attention(q, k, v, client=client, causal=True, return_lse=True, **options)
        return (o * o).sum() + lse.sum()

    expected = jax.grad(loss, (0, 1, 2))(q, k, v)
    client.asked()
    saving = jax.grad(lambda *t: loss(*t, save=True), (0, 1, 2))
    for function in (saving, jax.jit(saving)):
        actual = function(q, k, v)
        assert all(map(np.array_equal, actual, expected))
        assert client.asked() == [("/attention", "save"), ("/attention/grad", "saved")]
    attention(q, k, v, client=client, save=True)
    assert client.asked() == [("/attention", "")]  # not differentiated, so nothing is saved
    many = jax.vmap(saving)(*(t[None].repeat(2, 0) for t in (q, k, v)))
    assert client.asked() == [("/attention", ""), ("/attention/grad", "")]
    for one, whole in zip(many, expected, strict=True):
        np.testing.assert_allclose(one[1], whole, rtol=1e-5, atol=1e-6)
    assert_freed(client)
    _, back = jax.vjp(lambda *t: attention(*t, client=client, causal=True, save=True), q, k, v)
    do = jax.numpy.ones(q.shape)
    first = back(do)
    assert_freed(client)
    client.asked()
    assert all(map(np.array_equal, back(do), first))  # the first backward freed the forward: this sends all tensors
    assert client.asked()[-1] == ("/attention/grad", "")
    with pytest.raises(Exception, match="second-order"):
        jax.grad(lambda q: jax.grad(lambda q: loss(q, k, v, save=True))(q).sum())(q)
    for one in client.held():
        client.delete_saved(one)


def test_a_backward_from_a_saved_forward_has_the_timeout_and_the_priority_of_its_call(client):
    q, k, v = (normal(*shape).requires_grad_() for shape in SHAPES.values())
    flashpoint.torch.attention(q, k, v, client=client, save=True, timeout=123.0, priority=3).sum().backward()
    assert client.sent[:2] == [
        ("/attention", "save", 123.0, "3"), ("/attention/grad", "saved", 123.0, "3"),
    ]  # fmt: skip
