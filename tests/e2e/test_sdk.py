"""Every public call of the client works with a real server process."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
import torch

import flashpoint
from tests.support.oracle import answer, close, tensors


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        yield client


def test_torch_in_torch_out(client):
    q, k, v, _ = tensors(2, 4, 33, 16)
    o, lse = client.attention(q, k[:, :2], v[:, :2], causal=True, return_lse=True)
    expected = answer({"q": q, "k": k[:, :2], "v": v[:, :2]}, {"causal": True})
    assert (o.dtype, lse.dtype) == (torch.float32, torch.float32)
    close(o, expected["o"])
    close(lse, expected["lse"])


def test_numpy_in_numpy_out(client):
    q, k, v, _ = tensors(2, 4, 33, 16)
    o = client.attention(q.numpy(), k.numpy(), v.numpy())
    assert isinstance(o, np.ndarray)
    close(o, answer({"q": q, "k": k, "v": v}, {})["o"])


def test_bfloat16_is_the_same_bits_from_numpy_and_from_torch(client):
    q, k, v, _ = tensors(1, 2, 17, 32, dtype=torch.bfloat16)
    arrays = [t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) for t in (q, k, v)]
    from_numpy, from_torch = client.attention(*arrays), client.attention(q, k, v)
    assert from_numpy.dtype == ml_dtypes.bfloat16
    assert from_torch.dtype == torch.bfloat16
    assert from_numpy.view(np.uint16).tolist() == from_torch.view(torch.uint16).tolist()
    close(from_torch, answer({"q": q, "k": k, "v": v}, {})["o"], bound=2**-7)


def test_masks_sinks_and_lengths_mean_what_they_say(client):
    q, k, v, _ = tensors(2, 2, 9, 8)
    mask, sinks = tensors(2, 1, 9, 9, n=1)[0], torch.tensor([0.5, -1.0])
    for more in ({"attn_mask": mask, "sinks": sinks}, {"attn_mask": mask > 0}, {"kv_lengths": [9, 4]}):
        close(client.attention(q, k, v, **more), answer({"q": q, "k": k, "v": v, **more}, {})["o"])


def test_ragged_batches(client):
    q, k, v, _ = tensors(12, 2, 8)
    t = {"q": q, "k": k, "v": v, "cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": np.array([0, 5, 12], np.int32)}
    close(client.attention(**t, layout="thd"), answer(t, {"layout": "thd"})["o"])


def test_every_option_of_a_call_arrives(client):
    q, k, v, do = (t.numpy() for t in tensors(1, 2, 9, 8))
    options = {
        "causal": True, "causal_alignment": "top_left", "window": (4, -1), "scale": 0.3, "softcap": 5.0,
        "dropout_p": 0.2, "dropout_seed": 7, "precision": "ieee", "alibi_slopes": np.ones(2, np.float32),
    }  # fmt: skip
    o, meta = client.attention(q, k, v, **options, with_meta=True, priority=3, request_id="an-id", timeout=30)
    plain = client.attention(q, k, v)
    assert not np.allclose(o, plain)
    assert (meta.seed, meta.request_id) == (7, "an-id")
    grads = client.attention_grad(do, q, k, v, **options, deterministic=True)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    with pytest.raises(flashpoint.InvalidInputError) as info:
        client.attention(*(np.ones((1, 1, 2, 577), np.float32),) * 3, backend="cpu")
    assert [error.field for error in info.value.errors] == ["q"]


def test_gradients_with_and_without_the_forwards_answers(client):
    q, k, v, do = tensors(1, 2, 21, 16)
    t = {"q": q, "k": k, "v": v, "do": do}
    o, lse = client.attention(q, k, v, return_lse=True)
    dlse = tensors(1, 2, 21, n=1, seed=1)[0]
    expected = answer(t, {})
    for actual in (client.attention_grad(do, q, k, v), client.attention_grad(do, q, k, v, o=o, lse=lse)):
        for grad, name in zip(actual, ("dq", "dk", "dv"), strict=True):
            close(grad, expected[name])
    (dk,) = client.attention_grad(do, q, k, v, o=o, lse=lse, dlse=dlse, grads=["dk"])
    close(dk, answer(t | {"dlse": dlse}, {})["dk"])


def test_a_picked_seed_gives_the_same_mask_again(client):
    q, k, v, _ = tensors(1, 2, 40, 8)
    o, meta = client.attention(q, k, v, dropout_p=0.5, with_meta=True)
    assert 0 <= meta.seed < 1 << 53
    assert torch.equal(client.attention(q, k, v, dropout_p=0.5, dropout_seed=meta.seed), o)
    with pytest.raises(flashpoint.InvalidInputError) as info:
        client.attention_grad(o, q, k, v, dropout_p=0.5)
    assert info.value.errors[0].field == "dropout_seed"


def test_meta_says_who_answered_and_how_long_it_took(client):
    q, k, v, _ = tensors(1, 1, 8, 8)
    _, meta = client.attention(q, k, v, backend="tiled", with_meta=True)
    assert (meta.backend, meta.batch_size, meta.seed, meta.retries) == ("tiled", 1, None, 0)
    assert meta.request_id
    assert {"decode", "queue", "compute", "encode"} <= meta.timings.keys()


def test_the_servers_field_errors_reach_the_caller(client):
    q, k, v, _ = tensors(1, 2, 8, 8)
    with pytest.raises(flashpoint.InvalidInputError) as info:
        client.attention(q, k[..., :4], v)
    assert info.value.status == 422
    assert info.value.errors[0].field == "k"
    assert info.value.request_id or info.value.code


def test_info_and_health(client):
    assert client.live()
    assert client.ready()
    assert "backends" in client.info()


def test_the_asynchronous_twin(server):
    q, k, v, do = tensors(2, 2, 17, 8)

    async def run():
        async with flashpoint.AsyncClient(server.url) as client:
            assert await client.live()
            assert await client.ready()
            info = await client.info()
            answers = await asyncio.gather(*(client.attention(q * i, k, v) for i in range(1, 5)))
            grads = await client.attention_grad(do.numpy(), q.numpy(), k.numpy(), v.numpy())
            return info, answers, grads

    info, answers, grads = asyncio.run(run())
    with flashpoint.Client(server.url) as client:
        assert info.keys() == client.info().keys()
        for i, o in enumerate(answers, 1):
            close(o, answer({"q": q * i, "k": k, "v": v}, {})["o"])
        for actual, same in zip(grads, client.attention_grad(do, q, k, v), strict=True):
            assert np.array_equal(actual, same.numpy())


def test_a_large_answer_arrives_whole(client):
    """A large answer, which needs many socket reads, arrives complete."""
    q = tensors(1, 4, 1, 64, n=1)[0].expand(1, 4, 16384, 64)
    k, v = tensors(1, 4, 1, 64, n=2, seed=1)
    o = client.attention(q, k, v)
    assert torch.equal(o, v.expand_as(o))  # with one key, o is the value of that key


@pytest.mark.parametrize("caches", [5, None, "x"], ids=str)
def test_caches_that_are_no_list_are_refused_by_name(server, caches):
    with flashpoint.Client(server.url) as client, pytest.raises(flashpoint.InvalidInputError, match="caches"):
        client.attention(np.zeros((1, 1, 2, 4), np.float32), caches=caches, layer=0)
