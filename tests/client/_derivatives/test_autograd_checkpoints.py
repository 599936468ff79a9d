"""`flashpoint.torch.attention` is right if torch repeats a forward, moves saved tensors, or runs a backward twice.

If a repeated forward dropped other weights than the first, o would be right and the gradients would be wrong.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import flashpoint
from flashpoint.torch import attention
from tests.support.oracle import tensors
from tests.support.servers import wait_for
from tests.support.sockets import held_since


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        yield client


def inputs():
    return [t.clone().requires_grad_() for t in tensors(2, 2, 12, 8)[:3]]


def layers(client, save, x, k, v):
    """Return the output of two attention layers with dropout; each draws a separate seed from torch's generator."""
    o = attention(x, k, v, client=client, dropout_p=0.5, save=save)
    o = torch.nn.functional.dropout(o, 0.25)
    return attention(o.sin(), k, v, client=client, dropout_p=0.5, save=save, causal=True)


def once(loss, given):
    loss.backward()  # a reentrant checkpoint refuses torch.autograd.grad
    return [t.grad for t in given]


def gradients(run, *, backward=once):
    given = inputs()
    torch.manual_seed(5)
    loss = run(*given).square().sum()
    torch.manual_seed(77)  # if the backward drew the dropout seed anew, it would get another one than the forward
    return backward(loss, given)


def nested(function, *x):
    return checkpoint(lambda *x: checkpoint(function, *x, use_reentrant=False), *x, use_reentrant=False)


def without_early_stop(function, *x):
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *x, use_reentrant=False)


def selective(function, *x):
    def policy(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.sin.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, *x, use_reentrant=False, context_fn=contexts)


def offloaded(function, *x):
    with torch.autograd.graph.save_on_cpu():
        return function(*x)


def copied(function, *x):
    """Run a function whose tensors saved for the backward are copied, as if they were moved to a disk and back."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return function(*x)


WAYS = {
    "reentrant": lambda f, *x: checkpoint(f, *x, use_reentrant=True),
    "not reentrant": lambda f, *x: checkpoint(f, *x, use_reentrant=False),
    "without early stop": without_early_stop,
    "nested": nested,
    "selective": selective,
    "offloaded": offloaded,
    "copied": copied,
}


@pytest.mark.parametrize("save", [False, True])
def test_every_way_of_saving_gives_the_gradients_of_a_plain_call(server, client, save):
    saved_count = held_since(server, "saved")
    expected = gradients(partial(layers, client, False))
    for name, way in WAYS.items():
        actual = gradients(partial(way, partial(layers, client, save)))
        assert all(map(torch.equal, actual, expected)), name
    gc.collect()
    wait_for(lambda: not saved_count(), saved_count)


@pytest.mark.parametrize("save", [False, True])
def test_a_backward_uses_the_second_forward_whole_if_it_drops_other_weights(client, save):
    """With preserve_rng_state=False, the repeated forward drops other weights. dv must be the repeated forward's."""
    q, k, v = inputs()
    torch.manual_seed(5)
    o = checkpoint(
        lambda v: attention(q, k, v, client=client, dropout_p=0.5, save=save),
        v, use_reentrant=False, preserve_rng_state=False,
    )  # fmt: skip
    torch.manual_seed(6)
    (dv,) = torch.autograd.grad(o.sum(), v)
    torch.manual_seed(6)
    (expected,) = torch.autograd.grad(attention(q, k, v, client=client, dropout_p=0.5).sum(), v)
    assert torch.equal(dv, expected)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("way", [WAYS["not reentrant"], lambda f, *x: f(*x)], ids=["checkpoint", "plain"])
def test_a_graph_that_is_kept_has_the_same_gradients_again(client, way, save):
    def twice(loss, given):
        first = torch.autograd.grad(loss, given, retain_graph=True)
        second = torch.autograd.grad(loss, given)
        assert all(map(torch.equal, first, second))
        return second

    actual = gradients(partial(way, partial(layers, client, save)), backward=twice)
    assert all(map(torch.equal, actual, gradients(partial(layers, client, False))))


def test_the_seed_is_torchs(client):
    q, k, v = (t.detach() for t in inputs())

    def call(**keywords):
        return attention(q, k, v, client=client, dropout_p=0.5, with_meta=True, **keywords)

    torch.manual_seed(1)
    (first, meta), (second, _) = call(), call()
    torch.manual_seed(1)
    assert meta.seed == int(torch.randint(1 << 53, ()))
    assert torch.equal(client.attention(q, k, v, dropout_p=0.5, dropout_seed=meta.seed), first)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        assert torch.equal(call()[0], first)
    assert torch.equal(call()[0], first)  # fork_rng restored the generator's state
    assert torch.equal(call()[0], second)
    assert call(dropout_seed=(1 << 64) - 1)[1].seed == (1 << 64) - 1
    state = torch.get_rng_state()
    attention(q, k, v, client=client)
    assert torch.equal(torch.get_rng_state(), state)  # no seed is drawn without dropout
    with pytest.raises(flashpoint.InvalidInputError, match="dropout_seed"):
        call(dropout_seed=-1)


def test_threads_draw_seeds_of_their_own(client):
    """Threads draw different seeds, and each backward uses its forward's seed: (dv * v).sum() equals o.sum()."""

    def replica(_):
        q, k, v = inputs()
        o, meta = attention(q, k, v, client=client, dropout_p=0.5, with_meta=True)
        o.sum().backward()
        torch.testing.assert_close((v.grad * v).sum(), o.sum())
        return meta.seed

    with ThreadPoolExecutor(8) as pool:
        seeds = list(pool.map(replica, range(8)))
    assert len(set(seeds)) == 8


def test_what_the_caller_changes_after_the_forward_is_not_used(client):
    """After an in-place change of kv_lengths, the backward raises for a tensor; for arrays and lists it uses a copy."""
    q, k, v = inputs()
    lengths = torch.tensor([5, 9])
    for given in (lengths.numpy().copy(), lengths.tolist()):
        o = attention(q, k, v, client=client, kv_lengths=given)
        given[0] = 12
        actual = torch.autograd.grad(o.sum(), v)
        expected = torch.autograd.grad(attention(q, k, v, client=client, kv_lengths=lengths).sum(), v)
        assert torch.equal(*actual, *expected)
    o = attention(q, k, v, client=client, kv_lengths=lengths)
    lengths[0] = 12
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
