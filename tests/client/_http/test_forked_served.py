"""Clients and caches of a real server work in a forked process."""

import copy
import pickle

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import flashpoint
from tests.support.forks import FORKING, SIZES, Child, in_child, tokens

pytestmark = FORKING


def test_parent_and_children_append_to_caches_of_their_own(server):
    with flashpoint.Client(server.url) as client:
        caches = client.caches(3, **SIZES)

        def fill(number):
            for step in range(8):
                k = tokens(100 * number + step)
                caches[number].append(k, k + 1)
            k, _ = caches[number].tensors()
            expected = np.concatenate([tokens(100 * number + step) for step in range(8)], 2)
            return bool(np.array_equal(k, expected[0])) or bool(np.array_equal(k, expected))

        children = [Child(lambda n=n: fill(n)) for n in (1, 2)]
        assert fill(0)
        assert all(child.result() for child in children)
        client.delete_caches(caches)


def test_a_sharded_cache_works_in_a_child_after_its_threads_ran(server):
    clients = [flashpoint.Client(server.url) for _ in range(2)]
    x = tokens(1, 8)
    with flashpoint.sharded.cache(clients, span=4, **SIZES) as cache:
        before = cache.attention(x, x, x, causal=True)
        again = in_child(lambda: cache.attention(x, at=None))
        whole = flashpoint.sharded.attention(clients, x, x, x)
        assert np.allclose(again, whole, atol=1e-5)
        assert np.allclose(in_child(lambda: flashpoint.sharded.attention(clients, x, x, x)), whole, atol=1e-6)
        with copy.deepcopy(cache) as other:
            other.truncate(2)
            assert (other.length, cache.length) == (2, 8)
        same = pickle.loads(pickle.dumps(cache))
        assert np.array_equal(same.attention(x), cache.attention(x))
        same._rounds.close()
        for client in same._rounds.clients:
            client.close()
        assert before.shape == x.shape
    for client in clients:
        client.close()
