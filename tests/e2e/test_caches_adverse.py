"""KV caches resist hostile callers: foreign ids, thousands of caches, absurd sizes, quotas, reused memory."""

import concurrent.futures
import os
import signal

import pytest
import torch

from tests.support.caches import HQ, SHAPE, D, attended, bearer, created, kv, posted, started
from tests.support.dense_attention import dense
from tests.support.messages import JSON, ask, message, normal, post, problem, read_metrics
from tests.support.servers import wait_for

pytestmark = pytest.mark.slow  # a separate server

MANY = 2000  # caches: the engine's answer takes several messages


@pytest.fixture(scope="module")
def shared_server(start_server, tmp_path_factory):
    """Return a server that tests share; a test deletes its caches."""
    return started(start_server, tmp_path_factory)


def lengths(server, one, name="alice"):
    return ask(server, f"/caches/{one}", **bearer(name)).json["lengths"]


def appended(server, one, k, v, name="alice", **options):
    return post(server, f"/caches/{one}/append", message({"k": k[0], "v": v[0]}, **options), **bearer(name))


def test_an_id_of_another_key_is_not_found_wherever_it_stands_and_nothing_else_happens(shared_server):
    (mine,), (yours,) = created(shared_server, "bob"), created(shared_server, "alice")
    k, v = kv(2, 1)
    appended(shared_server, yours, k, v)
    two = {name: t.repeat(2, 1, 1, 1) for name, t in {"q": normal(1, HQ, 2, D), "k": k, "v": v}.items()}
    answers = [
        appended(shared_server, yours, k, v, "bob"),
        attended(shared_server, two, "bob", caches=[mine, yours]),
        attended(shared_server, two, "bob", caches=[yours, mine]),
        attended(shared_server, {"q": two["q"]}, "bob", caches=[mine, yours]),
        posted(shared_server, "/caches/fork", {"caches": [mine, yours]}, "bob"),
        posted(shared_server, "/caches/fork", {"caches": [mine], "free": [yours]}, "bob"),
        posted(shared_server, "/caches/delete", {"caches": [mine, yours]}, "bob"),
        posted(shared_server, f"/caches/{yours}/truncate", {"length": 0}, "bob"),
        posted(shared_server, f"/caches/{yours}/renew", {}, "bob"),
        posted(shared_server, "/caches", {**SHAPE, "beside": yours}, "bob"),
        ask(shared_server, f"/caches/{yours}", "DELETE", **bearer("bob")),
        ask(shared_server, f"/caches/{yours}/tensors?layer=0", **bearer("bob")),
    ]  # fmt: skip
    assert [(answer.status, answer.json["code"]) for answer in answers] == [(404, "cache_not_found")] * len(answers)
    assert lengths(shared_server, mine, "bob") == [0, 0]
    assert lengths(shared_server, yours) == [2, 0]
    assert [cache["id"] for cache in ask(shared_server, "/caches", **bearer("bob")).json["caches"]] == [mine]
    posted(shared_server, "/caches/delete", {"caches": [mine]}, "bob")
    posted(shared_server, "/caches/delete", {"caches": [yours]})


def test_thousands_of_caches_are_made_listed_forked_and_deleted_by_one_call_each(shared_server):
    ids = created(shared_server, layers=1, count=MANY)
    assert len(set(ids)) == MANY
    assert {cache["id"] for cache in ask(shared_server, "/caches", **bearer("alice")).json["caches"]} == set(ids)
    copies = [
        cache["id"] for cache in posted(shared_server, "/caches/fork", {"caches": ids, "free": ids}).json["caches"]
    ]
    assert len(set(copies) - set(ids)) == MANY
    assert posted(shared_server, "/caches/delete", {"caches": copies}).status == 204
    gone = problem(posted(shared_server, "/caches/fork", {"caches": ids}), 404, "cache_not_found")
    assert gone["errors"][0]["loc"] == ["caches.0"]
    assert ask(shared_server, "/caches", **bearer("alice")).json == {"caches": []}


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"count": 4096, "max_length": (1 << 31) - 1}, 413, None),
        ({"count": 4097}, 422, "count"),
        ({"count": 4096, "layers": 512}, 422, "count"),
        ({"layers": 512, "kv_heads": 1 << 16, "head_dim": 1 << 16, "max_length": 1}, 413, None),
        ({"layers": 1 << 40}, 422, "layers"),
        ({"max_length": 1 << 40}, 422, "max_length"),
        ({"kv_heads": 1 << 40}, 422, "kv_heads"),
        ({"keep": [1] * 513, "layers": 512}, 422, "keep"),
        ({"keep": [1] * 511, "layers": 512}, 422, "keep"),
        ({"head_dim": list(range(1, 513)), "layers": 512}, 422, "layers"),
        ({"ttl_s": 1e300}, 422, "ttl_s"),
        ({"ttl_s": 0}, 422, "ttl_s"),
    ],
    ids=str,
)
def test_absurd_sizes_are_refused_before_memory_is_taken(shared_server, changes, status, field):
    answer = posted(shared_server, "/caches", {**SHAPE, **changes})
    document = problem(answer, status, "work_too_large" if status == 413 else "invalid_request")
    if field is not None:
        assert document["errors"][0]["loc"][0].partition(".")[0] == field, document
    wait_for(
        lambda: read_held(shared_server) == (0, 0), lambda: read_held(shared_server)
    )  # other tests' caches may be ending


def test_a_fork_of_too_many_layers_is_refused(shared_server):
    (one,) = created(shared_server, layers=512)
    answer = posted(shared_server, "/caches/fork", {"caches": [one] * 300})
    assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == ["caches"]
    posted(shared_server, "/caches/delete", {"caches": [one]})


def read_held(server):
    usage = ask(server, "/info", **bearer("alice")).json["caches"]
    return usage["caches"], usage["bytes"]


def test_a_key_that_uses_up_its_quota_is_refused_alone(shared_server):
    filled = []
    answer = None
    while answer is None or answer.status == 201:
        answer = posted(shared_server, "/caches", {**SHAPE, "layers": 1, "max_length": 1024}, "carol")
        filled += [cache["id"] for cache in answer.json.get("caches", [])]
    problem(answer, 429, "key_limit")
    assert appended(shared_server, filled[0], *kv(1000, 1), "carol").status == 200
    problem(posted(shared_server, "/caches/fork", {"caches": filled[:1]}, "carol"), 429, "key_limit")  # counts in full
    for name in ("alice", "bob"):
        (one,) = created(shared_server, name, max_length=1024)
        assert appended(shared_server, one, *kv(5, 1), name).status == 200
        posted(shared_server, "/caches/delete", {"caches": [one]}, name)
    posted(shared_server, "/caches/delete", {"caches": filled}, "carol")
    assert created(shared_server, "carol")
    listed = [cache["id"] for cache in ask(shared_server, "/caches", **bearer("carol")).json["caches"]]
    posted(shared_server, "/caches/delete", {"caches": listed}, "carol")


@pytest.mark.parametrize("backend", ["torch", "tiled", "reference"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_memory_that_had_another_owner_tells_nothing(shared_server, backend, masked):
    """Freed memory holds NaN, which would show if an unwritten number were read."""
    (one,) = created(shared_server)
    for layer in range(SHAPE["layers"]):
        assert (
            appended(shared_server, one, *(torch.full_like(t, torch.nan) for t in kv(3000, 1)), layer=layer).status
            == 200
        )
    posted(shared_server, "/caches/delete", {"caches": [one]})
    for reserved in (None, 1500):
        two = created(shared_server, "bob", count=2, max_length=reserved)
        k, v = kv(1033, 3, 2)
        q = normal(2, HQ, 3, D, seed=4)
        for n, length in enumerate((1030, 14)):
            assert (
                appended(shared_server, two[n], k[n : n + 1, :, :length], v[n : n + 1, :, :length], "bob").status == 200
            )
        new = [torch.stack((t[0, :, 1030:], t[1, :, 14:17])) for t in (k, v)]
        mask = {"attn_mask": torch.zeros(1, 1, 3, 1100)} if masked else {}
        tensors = {"q": q, "k": new[0], "v": new[1], **mask}
        answer = attended(shared_server, tensors, "bob", caches=two, causal=True, backend=backend)
        assert answer.status == 200, answer
        for n, length in enumerate((1033, 17)):
            whole = [t[n : n + 1, :, :length] for t in (k, v)]
            expected, _ = dense(q[n : n + 1], *whole, causal=True)
            actual = answer.tensors["o"][n : n + 1].double()
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            exported = ask(shared_server, f"/caches/{two[n]}/tensors", **bearer("bob")).tensors
            assert torch.equal(exported["k"], whole[0])
        posted(shared_server, "/caches/delete", {"caches": two}, "bob")


def test_a_call_that_is_refused_for_its_mask_has_written_nothing(shared_server):
    (one,) = created(shared_server)
    appended(shared_server, one, *kv(5, 1))
    q, (k, v) = normal(1, HQ, 2, D), kv(2, 2)
    mask = torch.zeros(1, 1, 2, 6)  # of 7 columns needed
    answer = attended(shared_server, {"q": q, "k": k, "v": v, "attn_mask": mask}, caches=[one])
    assert problem(answer, 422, "invalid_request")["errors"][0]["loc"] == ["attn_mask"]
    assert lengths(shared_server, one) == [5, 0]
    (other,) = created(shared_server)
    two = {name: t.repeat(2, 1, 1, 1) for name, t in {"q": q, "k": k, "v": v}.items()}
    short = {
        **two,
        "attn_mask": mask[..., :4],
        "q_lengths": torch.tensor([0, 2]),
    }  # too short for a cache without queries
    assert attended(shared_server, short, caches=[one, other]).status == 200
    assert (lengths(shared_server, one), lengths(shared_server, other)) == ([5, 0], [2, 0])
    posted(shared_server, "/caches/delete", {"caches": [one, other]})


def test_a_creation_that_its_engine_had_not_begun_may_be_sent_again(start_server):
    """A creation and a list name no cache that could be lost."""
    server = start_server()
    os.kill(server.engine_pid, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        requests = [
            pool.submit(post, server, "/caches", b"{}", JSON), pool.submit(ask, server, "/caches"),
        ]  # fmt: skip
        wait_for(
            lambda: read_metrics(server)["flashpoint_queue_requests"] == 2, lambda: "they do not wait for the engine"
        )
        os.kill(server.engine_pid, signal.SIGKILL)
        for one in requests:
            problem(one.result(), 503, "engine_lost")
    wait_for(lambda: post(server, "/caches", b"{}", JSON).status == 201, lambda: "no cache is made again")
