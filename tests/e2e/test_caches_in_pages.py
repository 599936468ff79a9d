"""The Triton kernels read pages of KV caches without a copy. They are interpreted, except in `make gpu-serve`."""

import concurrent.futures

import pytest
import torch

import flashpoint
from flashpoint_kernels import attention, quantize
from tests.support.messages import message, normal
from tests.support.oracle import answer


def test_bits_are_those_of_a_call_that_sends_all_keys(gated):
    """A call over two caches of different lengths gives the same bits as two calls that send all keys.

    `short` is a fork of the first 20 tokens of `cache`; after the fork, writes at token 17 replace the end of `cache`.
    """
    shapes = (1, 2, 5, 16), (1, 1, 40, 16), (1, 1, 40, 16)
    q, k, v = (normal(*shape, seed=n) for n, shape in enumerate(shapes))
    with flashpoint.Client(gated.server.url, timeout=240) as client:
        whole = client.attention(q[:, :, 4:], k, v, backend="triton")
        cut = client.attention(q[:, :, 4:], k[:, :, :20], v[:, :, :20], backend="triton")
        with client.cache(kv_heads=1, head_dim=16) as cache:
            cache.append(k[:, :, :35], v[:, :, :35])
            prompt = cache.attention(q, k[:, :, 35:], v[:, :, 35:], causal=True, backend="triton")
            torch.testing.assert_close(prompt[:, :, 4:], whole, rtol=0, atol=1e-6)
            with cache.fork(20) as short:
                cache.append(v[:, :, :3], k[:, :, :3], at=17)
                cache.append(k[:, :, 17:], v[:, :, 17:], at=17)
                both = client.attention(q[:, :, 4:].repeat(2, 1, 1, 1), caches=[cache, short], backend="triton")
        assert torch.equal(both, torch.cat((whole, cut)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_tokens_are_read_with_their_scales(gated, dtype):
    shapes = (1, 2, 2, 16), (1, 1, 40, 16), (1, 1, 40, 16)
    q, k, v = (normal(*shape, seed=n) for n, shape in enumerate(shapes))
    (k_values, k_scale), (v_values, v_scale) = quantize(k, dtype), quantize(v, dtype)
    expected = attention(q, k_values, v_values, k_scale=k_scale, v_scale=v_scale, causal=True, backend="reference")
    name = str(dtype).removeprefix("torch.")
    with (
        flashpoint.Client(gated.server.url, timeout=240) as client,
        client.cache(kv_heads=1, head_dim=16, dtype=name) as cache,
    ):
        cache.append(k[:, :, :38], v[:, :, :38])
        actual = cache.attention(q, k[:, :, 38:], v[:, :, 38:], causal=True, backend="triton")
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
        moved, _ = cache.tensors(0, like=q)
        assert torch.equal(moved, k_values.float() * k_scale[..., None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_key_weights_of_pages(gated, dtype):
    q, k, v = (normal(1, heads, n, 16, seed=n) for heads, n in ((2, 3), (1, 40), (1, 40)))
    with (
        flashpoint.Client(gated.server.url, timeout=240) as client,
        client.cache(kv_heads=1, head_dim=16, dtype=str(dtype).removeprefix("torch.")) as cache,
    ):
        cache.append(k[:, :, :37], v[:, :, :37])
        o, weights = cache.attention(
            q, k[:, :, 37:], v[:, :, 37:], causal=True, backend="triton", return_key_weights=True
        )
        held, values = cache.tensors(0, like=q)
        plain = cache.attention(q, causal=True, backend="triton")
    expected = answer({"q": q, "k": held, "v": values}, {"causal": True})
    torch.testing.assert_close(weights.double(), expected["key_weights"], rtol=1e-4, atol=1e-6)
    assert torch.equal(o, plain)


def test_calls_over_caches_of_one_dtype_share_a_launch(gated):
    """Calls over caches with the same dtype share a launch. Another dtype, or a block mask, needs a separate launch."""
    tokens = {"k": normal(1, 20, 16), "v": normal(1, 20, 16)}
    q = normal(1, 1, 2, 16, seed=3)
    blocks = {"q": q, **{name: t[None] for name, t in tokens.items()}, "block_mask": torch.ones(1, 1, dtype=torch.bool)}
    with flashpoint.Client(gated.server.url, timeout=240) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        caches = [client.cache(kv_heads=1, head_dim=16, dtype=d) for d in ("float32", "float32", "int8", "int8")]
        for cache in caches:
            cache.append(tokens["k"], tokens["v"])
        bodies = [message({"q": q}, backend="triton", caches=[cache.id]) for cache in caches]
        bodies.append(message(blocks, backend="triton"))
        with gated.busy(pool, message({"q": q, "k": q, "v": q}, backend="triton")) as blocked:
            queued = [gated.post(pool, "mate", body, "/attention") for body in bodies]
        assert blocked.result().status == 200
        answers = [one.result() for one in queued]
        for cache in caches:
            cache.delete()
    assert [answer.headers["x-batch-size"] for answer in answers] == ["2", "2", "2", "2", "1"]
