"""The SDK's KV caches: the order of calls, lengths, copies, accepted arguments, and the asyncio cache."""

import asyncio
import concurrent.futures
import copy
import math
import pickle

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
from flashpoint import InvalidInputError
from flashpoint_kernels import attention
from tests.support.caches import HK, HQ, KEYS, SHAPE, D, bearer, client, kv, started
from tests.support.forks import FORKING, SIZES, tokens
from tests.support.messages import ask, normal

pytestmark = FORKING


@pytest.fixture(scope="module")
def shared_server(start_server, tmp_path_factory):
    """Return a server that the tests of this module share. Each test deletes the caches that it creates."""
    return started(start_server, tmp_path_factory)


def test_calls_on_one_cache_keep_their_order_and_the_sdk_its_lengths(shared_server):
    with client(shared_server) as alice, alice.cache(**SHAPE) as cache:
        q, (k, v) = normal(1, HQ, 64, D, seed=1), kv(64, 2)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            done = [pool.submit(cache.append, k[0, :, n : n + 1], v[0, :, n : n + 1], layer=1) for n in range(64)]
            lengths = [one.result() for one in done]
        assert sorted(lengths) == list(range(1, 65))
        cache.refresh()  # `length` is that of the answer that arrived last, which may not be the largest
        o, meta = cache.attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], causal=True, with_meta=True)
        torch.testing.assert_close(
            o, attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], causal=True), rtol=1e-4, atol=1e-5
        )
        assert (meta.lengths, cache.length, cache.lengths) == ((9,), 64, [9, 64])
        draft = cache.fork()
        cache.truncate(5)
        assert (cache.lengths, draft.lengths) == ([5, 5], [9, 64])
        cache.attention(q[:, :, :2], k[:, :, 5:7], v[:, :, 5:7], layer=1)
        assert cache.lengths == [5, 7]
        both = alice.attention(q[:, :, :1].repeat(2, 1, 1, 1), caches=[cache, draft])
        for n, length in enumerate((5, 9)):
            expected = attention(q[:, :, :1], k[:, :, :length], v[:, :, :length])
            torch.testing.assert_close(both[n : n + 1], expected, rtol=1e-4, atol=1e-5)
        held_k, held_v = draft.tensors(0, like=q)
        assert torch.equal(held_k, k[:, :, :9])
        assert torch.equal(held_v, v[:, :, :9])
        draft.renew()
        copies = alice.fork_caches([cache, cache], [1, 2], free=[draft])
        assert [copy.length for copy in copies] == [1, 2]
        with pytest.raises(flashpoint.CacheError) as error:
            draft.refresh()
        assert error.value.code == "cache_not_found"
        draft.delete()
        for copy in copies:
            copy.delete()
        with pytest.raises(flashpoint.InvalidInputError):
            alice.attention(q, k, v, layer=1)
    assert ask(shared_server, "/caches", **bearer("alice")).json == {"caches": []}


def test_the_list_of_caches_follows_all_pages(shared_server):
    """A page has 100 caches unless the request asks for another number."""
    with client(shared_server) as alice, client(shared_server, "bob") as bob:
        made = [*alice.caches(120, **SHAPE), *alice.caches(115, **SHAPE)]
        made[-1].append(*(t[0] for t in kv(3, 2)), layer=0)
        found = alice.list_caches()
        assert [cache.id for cache in found] == [cache.id for cache in made]
        assert found[-1].lengths == [3, 0]
        assert bob.list_caches() == []

        async def listed():
            async with flashpoint.AsyncClient(shared_server.url, api_key=KEYS["alice"], timeout=240) as twin:
                return [cache.id for cache in await twin.list_caches()]

        assert asyncio.run(listed()) == [cache.id for cache in made]
        alice.delete_caches(found)
        assert alice.list_caches() == []


def test_the_sdk_takes_numpy_numbers_for_numbers(shared_server):
    q, (k, v) = normal(1, HQ, 3, D), kv(3, 2)
    sizes = {"layers": np.int64(2), "kv_heads": np.array([HK, HK]), "head_dim": np.int32(D), "ttl_s": np.float32(60)}
    with client(shared_server) as alice, alice.caches(np.int64(1), **sizes)[0] as cache:
        assert cache.append(k[0], v[0], layer=np.int64(1), at=np.int64(0)) == 3
        cache.attention(q, k, v, layer=np.int64(0), at=np.int64(0))
        copies = [cache.fork(np.int64(2)), *alice.fork_caches([cache, cache], np.array([1, 2]))]
        assert [copy.lengths for copy in copies] == [[2, 2], [1, 1], [2, 2]]
        alice.delete_caches(copies)
        cache.truncate(np.int64(1))
        assert cache.lengths == [1, 1]
        cache.truncate(torch.tensor(0))
        assert cache.lengths == [0, 0]


@pytest.mark.parametrize("ttl", [math.nan, np.float32("inf"), {60}, object()], ids=["nan", "inf", "set", "object"])
def test_the_sdk_names_a_number_that_json_cannot_hold(shared_server, ttl):
    with client(shared_server) as alice, pytest.raises(InvalidInputError, match="ttl_s: must be text, finite numbers"):
        alice.cache(**SHAPE, ttl_s=ttl)


def test_the_asyncio_twin_does_the_same(shared_server):
    async def run():
        async with flashpoint.AsyncClient(shared_server.url, api_key=KEYS["bob"], timeout=240) as bob:
            q, (k, v) = normal(1, HQ, 3, D).numpy(), (t.numpy() for t in kv(3, 2))
            async with await bob.cache(**SHAPE) as cache:
                assert await cache.append(k[0], v[0], layer=1) == 3
                o = await cache.attention(q, k, v, causal=True)
                copy = await cache.fork(2)
                await copy.truncate(1)
                await copy.renew()
                await cache.refresh()
                assert (cache.lengths, copy.lengths) == ([3, 3], [1, 1])
                assert np.array_equal((await cache.tensors())[0], k)
                made = await bob.fork_caches([cache], free=[copy])
                made += await bob.caches(2, **SHAPE, beside=cache)
                assert (await bob.attention(np.concatenate((q, q)), caches=[cache, made[0]])).shape == (2, *o.shape[1:])
                for one in made:
                    await one.delete()
            return o

    o = asyncio.run(run())
    q, (k, v) = normal(1, HQ, 3, D), kv(3, 2)
    np.testing.assert_allclose(o, attention(q, k, v, causal=True).numpy(), rtol=1e-4, atol=1e-5)


def test_a_deep_copy_of_a_cache_is_a_fork_and_a_pickle_names_the_same(server):
    x = tokens(2, 4)
    with flashpoint.Client(server.url) as client, client.cache(**SIZES) as cache:
        cache.append(x, x)
        with copy.deepcopy(cache) as other:
            other.append(x, x)
            assert (cache.length, other.length) == (4, 8)
            cache.refresh()
            assert cache.length == 4
        same = pickle.loads(pickle.dumps(cache))
        assert same.append(x, x) == 8
        same._client.close()
        cache.refresh()
        assert cache.length == 8


async def _async_copy(url):
    async with flashpoint.AsyncClient(url) as client, await client.cache(**SIZES) as cache:
        with pytest.raises(TypeError, match=r"AsyncCache cannot be deep-copied.* await fork\(\)"):
            copy.deepcopy(cache)


def test_a_deep_copy_of_a_cache_of_asyncio_says_what_to_do(server):
    import asyncio

    asyncio.run(_async_copy(server.url))
