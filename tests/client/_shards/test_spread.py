"""A `ShardedCache` names the server that failed, repairs incomplete writes in later calls, and checks its sizes."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
import flashpoint
from flashpoint import sharded
from tests.support.balancer import balancer
from tests.support.messages import ask
from tests.support.servers import wait_for
from tests.support.sharded import HQ, SHAPE, D, clients_of, expected, near, normal, tokens, whole


def test_a_server_that_fails_is_named_and_what_it_left_is_mended(server, left):
    up = {"up": True}

    def choose(_):
        if not up["up"]:
            raise ConnectionError
        return server

    made = tokens(20)
    with (
        balancer(choose) as failing, clients_of(server, failing, retries=0) as pair,
        sharded.cache(pair, **SHAPE, span=8) as cache,
    ):  # fmt: skip
        cache.append(*(t[:, :, :6] for t in made))
        cache.append(*(t[:, :, 6:10] for t in made))  # tokens 8 and 9 are on the second server
        up["up"] = False
        for call in (
            lambda: cache.attention(normal(1, HQ, 1, D)), lambda: cache.append(*tokens(20)),
            lambda: cache.append(*tokens(9), at=3), lambda: cache.fork(), lambda: cache.renew(),
        ):  # fmt: skip
            with pytest.raises(flashpoint.ConnectionFailedError, match=failing.url):
                call()
        assert cache.length == 3  # the tokens before the failed write
        assert len(left()) == 2  # no fork of the cache remains
        up["up"] = True
        whole(cache, [t[:, :, :3] for t in made])
        cache.append(*(t[:, :, 3:] for t in made))
        whole(cache, made)
        with pytest.raises(flashpoint.DeadlineExceededError, match="http://"):
            cache.attention(normal(1, HQ, 1, D), timeout=1e-6)
    for each in left():
        ask(server, f"/caches/{each}", "DELETE")


def test_tokens_of_a_write_that_failed_on_one_server_are_never_read(server, left):
    """The first server has written its tokens when the second one fails. Each operation may be the next."""
    down = []

    def written():
        return [8] in [ask(server, f"/caches/{each}").json["lengths"] for each in left()]

    def choose(_):
        if down:
            wait_for(written, lambda: "the first server gets no tokens", seconds=60)
            raise ConnectionError
        return server

    first, lost, other, q = tokens(3), tokens(7, seed=5), tokens(2, seed=9), normal(1, HQ, 2, D)
    both = [np.concatenate(pair, 2) for pair in zip(first, other, strict=True)]

    def attends(cache):
        near(cache.attention(q), expected(q, *first)[0], 4e-6)

    def attends_and_writes(cache):
        near(cache.attention(q, *other, causal=True), expected(q, *both, causal=True)[0], 4e-6)
        whole(cache, both)

    def appends(cache):
        cache.append(*other)
        whole(cache, both)

    def forks(cache):
        with cache.fork() as copy:
            whole(copy, first)

    def cuts(cache):
        cache.truncate(2)
        whole(cache, [t[:, :, :2] for t in first])

    for following in (attends, attends_and_writes, appends, forks, cuts):
        with (
            balancer(choose) as failing, clients_of(server, failing, retries=0) as pair,
            sharded.cache(pair, **SHAPE, span=8) as cache,
        ):  # fmt: skip
            cache.append(*tokens(10))
            cache.append(*first, at=0)
            down.append(failing)
            with pytest.raises(flashpoint.ConnectionFailedError, match=failing.url):
                cache.append(*lost)
            down.clear()
            assert cache.length == 3
            following(cache)


@pytest.mark.parametrize("down", [0, 1, 2])
def test_every_part_of_a_cache_is_renewed(server, left, down):
    up = []

    def choose(_):
        if up:
            raise ConnectionError
        return server

    with balancer(choose) as failing:
        servers = [failing if n == down else server for n in range(3)]
        with clients_of(*servers, retries=0) as clients, sharded.cache(clients, **SHAPE, span=8) as cache:
            cache.append(*tokens(20))
            up.append(True)
            with pytest.raises(flashpoint.ConnectionFailedError, match=failing.url):
                cache.renew()
            up.clear()
            cache.renew()
    assert not left()


@pytest.mark.parametrize(
    "given",
    [
        {"span": 0},
        {"keep": 3},
        {"max_length": 5},
        {"beside": "x"},
        {"kvheads": 1},
        {"layers": "x"},
        {"layers": None},
        {"layers": 0},
    ],
    ids=str,
)
def test_sizes_that_it_does_not_take_are_refused_by_name(clients, given):
    with pytest.raises(flashpoint.InvalidInputError, match=next(iter(given))):
        sharded.cache(clients, **given)


def test_sizes_may_be_numpys_numbers(clients):
    k, v = tokens(5)
    heads, dim = (np.int64(SHAPE[name]) for name in ("kv_heads", "head_dim"))
    with sharded.cache(
        clients, **{**SHAPE, "kv_heads": heads, "head_dim": dim, "layers": np.int64(1)}, span=3
    ) as cache:
        cache.append(k, v)
        cache.append(k, v, at=1)
        assert cache.length == 6
