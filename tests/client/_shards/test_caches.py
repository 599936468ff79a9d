"""`ShardedCache` and its asyncio counterpart overwrite, truncate and fork tokens over several servers."""

import asyncio
import contextlib

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
import torch

import flashpoint
from flashpoint import sharded
from flashpoint_kernels import attention
from tests.support.sharded import HQ, SHAPE, D, expected, near, normal, tokens, whole


def test_tokens_are_rewritten_cut_and_forked_over_the_servers(clients, left):
    made = tokens(40)
    with sharded.cache(clients, **SHAPE, layers=2, span=7) as cache:
        assert cache.append(*made) == 40
        assert cache.append(made[0][0, :, :9], made[1][0, :, :9], layer=1) == 9
        whole(cache, made)
        with cache.fork() as copy, cache.fork(16) as short:
            other = tokens(5, seed=5)
            assert cache.append(*other, at=12) == 17
            whole(cache, [np.concatenate((a[:, :, :12], b), 2) for a, b in zip(made, other, strict=True)])
            whole(cache, [t[:, :, :9] for t in made], layer=1)
            assert (short.lengths, cache.lengths, copy.lengths) == ([16, 9], [17, 9], [40, 9])
            short.truncate(8)
            whole(short, [t[:, :, :8] for t in made])
            whole(short, [t[:, :, :8] for t in made], layer=1)
            whole(copy, made)
            copy.truncate(0)
            assert copy.length == 0
            o, lse = copy.attention(normal(1, HQ, 2, D), return_lse=True)
            assert not o.any()
            assert np.isneginf(lse).all()
            copy.append(*(t[:, :, :15].swapaxes(1, 2) for t in made), layout="bshd")
            whole(copy, [t[:, :, :15] for t in made])
            q = normal(1, HQ, 3, D)
            o = copy.attention(q, *(t[:, :, :3] for t in other), at=2, causal=True)
            rewritten = [np.concatenate((a[:, :, :2], b[:, :, :3]), 2) for a, b in zip(made, other, strict=True)]
            near(o, expected(q, *rewritten, causal=True)[0], 4e-6)
            whole(copy, rewritten)
            short.renew()
    assert not left()


def test_the_asyncio_twin_does_the_same(server, left):
    async def run():
        async with contextlib.AsyncExitStack() as stack:
            twins = [await stack.enter_async_context(flashpoint.AsyncClient(server.url, timeout=240)) for _ in range(2)]
            k, v = tokens(20)
            q = normal(1, HQ, 20, D)
            async with await sharded.async_cache(twins, **SHAPE, span=6) as cache:
                o = await cache.attention(q, k, v, causal=True)
                near(o, expected(q, k, v, causal=True)[0], 4e-6)
                async with await cache.fork(10) as copy:
                    assert await copy.append(k, v) == 30
                    await copy.truncate(3)
                    await copy.renew()
                    assert (cache.length, copy.lengths) == (20, [3])
                with pytest.raises(flashpoint.InvalidInputError, match="dropout_p"):
                    await cache.attention(q, dropout_p=0.5)

    asyncio.run(run())
    assert not left()


def test_torch_tensors_come_back_as_torch_tensors(clients):
    q, k, v = (torch.from_numpy(t).bfloat16() for t in (normal(1, HQ, 9, D), *tokens(9)))
    with sharded.cache(clients, **SHAPE, dtype="bfloat16", span=4) as cache:
        o = cache.attention(q, k, v, causal=True)
        assert o.dtype == torch.bfloat16
        torch.testing.assert_close(o, attention(q, k, v, causal=True, backend="tiled"), rtol=2**-6, atol=2**-6)
        assert cache.append(k[:, :, :1], v[:, :, :1], at=1) == 2  # the write truncates the tokens on later servers
        assert cache.attention(q[:, :, :1], with_meta=True)[1][0].keys == (0, 2)


@pytest.mark.parametrize("writes", [False, True])
def test_every_server_is_told_the_id_and_the_priority_of_the_request(clients, writes):
    with sharded.cache(clients, **SHAPE, span=4) as cache:
        cache.append(*tokens(9))
        new = [t[:, :, :1] for t in tokens(1)] if writes else []
        _, parts = cache.attention(normal(1, HQ, 1, D), *new, with_meta=True, request_id="mine", priority=9)
        assert [part.meta.request_id for part in parts] == ["mine"] * 3
        with pytest.raises(flashpoint.InvalidInputError, match="priority"):
            cache.attention(normal(1, HQ, 1, D), priority=10)
