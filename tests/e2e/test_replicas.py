"""KV caches and saved forwards work with two replicas behind a balancer that routes by X-Flashpoint-Replica."""

import asyncio
import json

import numpy as np
import pytest
import torch

import flashpoint
import flashpoint.torch
from flashpoint import sharded
from tests.support.balancer import balancer, by_hash, by_name, haproxy, nginx, require
from tests.support.messages import JSON, ask, message, normal, post, problem

SHAPE = {"layers": 1, "kv_heads": 2, "head_dim": 16}
SECRET = {"FLASHPOINT_CACHE_SECRET": "a secret of the tests, of 32 characters and more"}
NAME = "x-flashpoint-replica"


@pytest.fixture(scope="module")
def replicas(start_server):
    return {name: start_server(replica=name, environment=SECRET) for name in ("a", "b")}


@pytest.fixture(scope="module", params=["ours", "nginx", "haproxy"])
def balanced(replicas, request, tmp_path_factory):
    """Yield the address of a balancer that sends each request to the replica named in its X-Flashpoint-Replica."""
    if request.param == "ours":
        with balancer(by_name(replicas)) as address:
            yield address
        return
    require(request.param)
    start = {"nginx": nginx, "haproxy": haproxy}[request.param]
    with start(replicas, tmp_path_factory.mktemp(request.param)) as address:
        yield address


def client(server, **how):
    return flashpoint.Client(server.url, timeout=240, **how)


def posted(server, path, document, **headers):
    return post(server, path, json.dumps(document).encode(), JSON, **headers)


def created(server, **headers):
    answer = posted(server, "/caches", SHAPE, **headers)
    assert answer.status == 201, answer
    return answer.json["caches"][0]["id"]


def kv(count, seed):
    return normal(1, 2, count, 16, seed=seed), normal(1, 2, count, 16, seed=seed + 1000)


def cache_count(server):
    return {cache["id"] for cache in ask(server, "/caches").json["caches"]}


def saved(server):
    return {forward["id"] for forward in ask(server, "/saved").json["saved"]}


def every_call(server, one):
    """Make every call that names a cache, and return the answers; the last ones delete the cache `one`."""
    q, (k, v) = normal(1, 2, 1, 16), kv(1, 1)
    return [
        ask(server, f"/caches/{one}"), ask(server, f"/caches/{one}/tensors"),
        post(server, f"/caches/{one}/append", message({"k": k, "v": v})),
        posted(server, f"/caches/{one}/truncate", {"length": 0}), posted(server, f"/caches/{one}/renew", {}),
        posted(server, "/caches/fork", {"caches": [one]}), posted(server, "/caches", {**SHAPE, "beside": one}),
        post(server, "/attention", message({"q": q, "k": k, "v": v}, caches=[one])),
        posted(server, "/caches/delete", {"caches": [one]}), ask(server, f"/caches/{one}", "DELETE"),
    ]  # fmt: skip


def test_a_replica_names_the_one_that_holds_a_cache(replicas):
    one = created(replicas["a"])
    for answer in every_call(replicas["b"], one):
        document = problem(answer, 421, "cache_elsewhere")
        assert answer.headers[NAME] == "a"
        assert "X-Flashpoint-Replica: a" in document["detail"]
    assert ask(replicas["a"], f"/caches/{one}").status == 200
    assert ask(replicas["a"], f"/caches/{one}", "DELETE").status == 204


def test_every_answer_about_caches_says_what_leads_to_the_replica(replicas):
    b = replicas["b"]
    one = created(b)
    for answer in every_call(b, one):
        assert answer.headers[NAME] == "b", answer
    assert ask(b, "/caches").headers[NAME] == "b"
    q = message({name: normal(2, 3) for name in "qkv"})
    assert NAME not in post(b, "/attention", q).headers
    # A balancer may have other names for replicas. The server answers with the name that the request had, if valid.
    assert ask(b, "/caches", x_flashpoint_replica="MTAuMC4wLjE6ODAwMA==").headers[NAME] == "MTAuMC4wLjE6ODAwMA=="
    assert ask(b, "/caches", x_flashpoint_replica="no name").headers[NAME] == "b"
    for cache in cache_count(b):
        ask(b, f"/caches/{cache}", "DELETE")


def test_a_replica_names_the_one_that_holds_a_saved_forward(replicas):
    tensors = {name: normal(2, 3, seed=seed) for seed, name in enumerate("qkv")}
    answer = post(replicas["a"], "/attention", message(tensors, save=True))
    assert (answer.status, answer.headers[NAME]) == (200, "a")
    one = answer.metadata["saved"]
    do = message({"do": normal(2, 3)}, saved=one)
    for answer in (
        post(replicas["b"], "/attention/grad", do), ask(replicas["b"], f"/saved/{one}"),
        ask(replicas["b"], f"/saved/{one}", "DELETE"),
    ):  # fmt: skip
        document = problem(answer, 421, "cache_elsewhere")
        assert answer.headers[NAME] == "a"
        assert "X-Flashpoint-Replica: a" in document["detail"]
    answer = post(replicas["a"], "/attention/grad", do)
    assert (answer.status, answer.headers[NAME]) == (200, "a")
    assert ask(replicas["a"], f"/saved/{one}", "DELETE").status == 204


@pytest.mark.parametrize("name", ["", "a", "b"])
def test_the_sdk_reaches_the_replica_that_holds_a_saved_forward(replicas, name):
    """From a saved forward or its id, the SDK finds the replica that holds it, even if the client names another one."""
    q, k, v = (normal(1, 2, 7, 16, seed=seed).numpy() for seed in range(3))
    with client(replicas["a"]) as direct:
        expected = direct.attention_grad(q, q, k, v)
    sent_names = []

    def choose(sent):
        sent_names.append(sent)
        return choose_by_name(sent)

    choose_by_name = by_name(replicas)
    with balancer(choose) as balanced, client(balanced, replica=name) as through, client(balanced) as other:
        for _ in range(4):
            forward = through.attention(q, k, v, save=True)
            sent_names.clear()
            assert all(map(np.array_equal, through.attention_grad(q, saved=forward), expected))
            assert sent_names == [forward.replica]
            assert all(map(np.array_equal, through.attention_grad(q, saved=forward.saved), expected))
            assert all(map(np.array_equal, other.attention_grad(q, saved=forward.saved), expected))
            (other if name else through).delete_saved(forward.saved)
            sent_names.clear()
            through.delete_saved(forward)  # it is already deleted, which is no error
            assert sent_names == [forward.replica]
        inputs = [torch.from_numpy(t).requires_grad_() for t in (q, k, v)]
        o = flashpoint.torch.attention(*inputs, client=through, save=True)
        actual = torch.autograd.grad(o, inputs, torch.from_numpy(q))
        assert all(map(np.array_equal, actual, expected))

        async def twin():
            async with flashpoint.AsyncClient(balanced.url, timeout=240, replica=name) as client:
                forward = await client.attention(q, k, v, save=True)
                actual = await client.attention_grad(q, saved=forward.saved)
                await client.delete_saved(forward.saved)
                return actual

        assert all(map(np.array_equal, asyncio.run(twin()), expected))
    assert not saved(replicas["a"]) | saved(replicas["b"])


def test_a_balancer_that_does_not_lead_to_a_saved_forward_is_told_of(replicas):
    q = normal(1, 2, 7, 16).numpy()
    with balancer(lambda _: replicas["b"]) as stubborn, client(replicas["a"]) as one, client(stubborn) as through:
        forward = one.attention(q, q, q, save=True)
        with pytest.raises(flashpoint.CacheError, match="X-Flashpoint-Replica: a") as error:
            through.attention_grad(q, saved=forward)
        assert (error.value.status, error.value.code) == (421, "cache_elsewhere")
        with pytest.raises(flashpoint.CacheError, match="X-Flashpoint-Replica: a"):
            through.delete_saved(forward)  # it still exists at replica a, so this is an error
        one.delete_saved(forward)


def test_without_a_common_secret_an_id_is_unknown_elsewhere(replicas, server):
    one, other = created(replicas["a"]), created(server)
    problem(ask(server, f"/caches/{one}"), 404, "cache_not_found")
    problem(ask(replicas["a"], f"/caches/{other}"), 404, "cache_not_found")
    name = ask(server, "/caches").headers[NAME]
    assert len(name) == 16
    assert ask(server, f"/caches/{other}", "DELETE").headers[NAME] == name
    ask(replicas["a"], f"/caches/{one}", "DELETE")


@pytest.mark.slow
def test_a_replica_that_is_started_again_has_lost_its_caches(replicas, start_server):
    one = created(replicas["a"])
    again = start_server(replica="a", environment=SECRET)
    problem(ask(again, f"/caches/{one}"), 410, "cache_lost")
    ask(replicas["a"], f"/caches/{one}", "DELETE")


def test_the_sdk_reaches_each_cache_through_a_balancer(replicas, balanced):
    q, (k, v) = normal(1, 2, 7, 16, seed=1), kv(7, 2)
    with client(balanced) as through:
        caches = [through.cache(**SHAPE) for _ in range(6)]
        assert {cache.replica for cache in caches} == {"a", "b"}
        for cache in caches:
            for n in range(7):
                o = cache.attention(q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1])
            copy, neighbour = cache.fork(), through.cache(**SHAPE, beside=cache)
            neighbour.append(k[0], v[0])
            copy.truncate(7)
            both = through.attention(q[:, :, 6:].repeat(2, 1, 1, 1), caches=[copy, neighbour])
            assert torch.equal(both[:1], o)
            assert torch.equal(both[1:], o)
            assert {cache.id, copy.id, neighbour.id} <= cache_count(replicas[cache.replica])
            copy.renew()
            copy.delete()
            neighbour.delete()
            cache.refresh()
            assert torch.equal(cache.tensors(like=q)[0], k)
        with client(balanced) as other:  # this client knows the caches only by their ids
            for cache in caches * 2:
                assert torch.equal(other.attention(q[:, :, 6:], caches=[cache.id]), o)
        for cache in caches:
            cache.delete()
    assert not cache_count(replicas["a"]) | cache_count(replicas["b"])


def test_the_asyncio_twin_does_the_same(replicas, balanced):
    async def run():
        async with flashpoint.AsyncClient(balanced.url, timeout=240) as through:
            caches = [await through.cache(**SHAPE) for _ in range(4)]
            (k, v) = (t.numpy() for t in kv(3, 2))
            for cache in caches * 2:
                await cache.append(k, v)
            for cache in caches:
                copy = await cache.fork()
                assert (cache.length, copy.length) == (6, 6)
                await copy.delete()
                await cache.delete()
            return {cache.replica for cache in caches}

    assert asyncio.run(run()) == {"a", "b"}
    assert not cache_count(replicas["a"]) | cache_count(replicas["b"])


@pytest.mark.slow
def test_a_balancer_that_hashes_the_header_needs_a_value_of_the_client(replicas):
    k, v = kv(2, 3)
    with balancer(by_hash(replicas)) as hashing:
        reached = set()
        for session in range(8):
            with client(hashing, replica=f"session-{session}") as named, named.cache(**SHAPE) as cache:
                assert [cache.append(k, v) for _ in range(3)] == [2, 4, 6]
                assert cache.replica == f"session-{session}"
                reached |= {name for name in replicas if cache.id in cache_count(replicas[name])}
        assert reached == {"a", "b"}


def test_a_balancer_that_does_not_route_by_name_is_told_of(replicas):
    one = created(replicas["a"])
    with balancer(lambda _: replicas["b"]) as stubborn, client(stubborn) as through:
        with pytest.raises(flashpoint.CacheError, match="X-Flashpoint-Replica: a") as error:
            through.attention(normal(1, 2, 1, 16), caches=[one])
        assert (error.value.status, error.value.code) == (421, "cache_elsewhere")
    ask(replicas["a"], f"/caches/{one}", "DELETE")


def test_a_deletion_that_does_not_reach_the_cache_is_told_of(replicas):
    """A deletion that reaches the wrong replica raises CacheError, because the cache still exists and uses memory."""
    lead = ["a"]
    with balancer(lambda _: replicas[lead[0]]) as turning, client(turning) as through:
        cache = through.cache(**SHAPE)
        spread = sharded.cache([through], **SHAPE)
        lead[0] = "b"
        for delete in (cache.delete, lambda: through.delete_caches([cache]), spread.delete):
            with pytest.raises(flashpoint.CacheError, match="X-Flashpoint-Replica: a") as error:
                delete()
            assert error.value.code == "cache_elsewhere"
        assert cache_count(replicas["a"]) >= {cache.id}
        lead[0] = "a"
        for _ in range(2):  # the second deletion finds no cache
            cache.delete()
            spread.delete()
    assert cache_count(replicas["a"]) == set()


def test_a_cache_moves_to_another_server_with_its_bits(replicas):
    q, (k, v) = normal(1, 2, 1, 16, seed=1), kv(1500, 2)
    shape = {**SHAPE, "layers": 2}
    with (
        client(replicas["a"]) as here, client(replicas["b"]) as there,
        here.cache(**shape) as old, there.cache(**shape) as new,
    ):  # fmt: skip
        for layer in range(2):
            for start in range(0, 1500, 300):
                old.append(k[:, :, start : start + 300] + layer, v[:, :, start : start + 300], layer=layer)
            new.append(*old.tensors(layer), layer=layer)
        assert new.lengths == old.lengths == [1500, 1500]
        for layer in range(2):
            token = [t[:, :, :1] for t in kv(1, 5)]
            answers = [cache.attention(q, *token, layer=layer) for cache in (old, new)]
            assert torch.equal(*answers)
    assert not cache_count(replicas["a"]) | cache_count(replicas["b"])


@pytest.mark.parametrize("name", ["x" * 129, "two\nlines", 7])
def test_a_value_that_cannot_be_a_header_is_refused(name):
    with pytest.raises(flashpoint.InvalidInputError, match="replica"):
        flashpoint.Client(replica=name)


def test_numpy_is_as_torch(replicas):
    """One client creates the cache, and another uses it by its id and its replica's name, both with NumPy arrays."""
    k, v = (t.numpy() for t in kv(3, 2))
    with client(replicas["a"]) as one, one.cache(**SHAPE) as cache, client(replicas["a"], replica=cache.replica) as two:
        cache.append(k, v)
        o = two.attention(k[:, :, :1], caches=[cache.id])
        np.testing.assert_array_equal(o, cache.attention(k[:, :, :1]))
