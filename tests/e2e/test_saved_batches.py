"""Saved forwards share launches with other requests, and are freed if callers leave or a launch fails.

The Triton kernels run under the interpreter.
"""

import concurrent.futures
import contextlib

import pytest
import torch

from tests.support.messages import ask, message, normal, post, problem
from tests.support.servers import wait_for

KINDS = ("q", "k", "v")
HELD = message({name: normal(1, 2, 5, 16, seed=99) for name in KINDS}, backend="triton")


def tensors(seed, length=5):
    return {name: normal(1, 2, length, 16, seed=9 * seed + n) for n, name in enumerate(KINDS)}


def forward(seed, **options):
    return message(tensors(seed, 3 + seed), backend="triton", **options)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


def saved(server):
    return server.get("/info")[1]["caches"]["saved"]


@pytest.fixture(autouse=True)
def nothing_is_left(gated):
    yield
    for one in ask(gated.server, "/saved").json["saved"]:
        ask(gated.server, f"/saved/{one['id']}", "DELETE")
    wait_for(lambda: not saved(gated.server), lambda: gated.server.get("/info")[1]["caches"])


def test_forwards_that_are_saved_and_their_gradients_share_launches_with_others(gated, pool):
    seeds = range(3)
    alone = [post(gated.server, "/attention", forward(seed, return_lse=True)) for seed in seeds]
    with gated.busy(pool, HELD):
        queued = [gated.post(pool, "mate", forward(seed, return_lse=True, save=True)) for seed in seeds]
        queued.append(gated.post(pool, "mate", forward(4)))
    *actual, other = (future.result() for future in queued)
    assert {answer.headers["x-batch-size"] for answer in (*actual, other)} == {"4"}
    for one, expected in zip(actual, alone, strict=True):
        assert all(torch.equal(one.tensors[name], expected.tensors[name]) for name in ("o", "lse"))
    whole = [tensors(seed, 3 + seed) | answer.tensors for seed, answer in zip(seeds, alone, strict=True)]
    dos = [{"do": normal(1, 2, 3 + seed, 16, seed=50 + seed)} for seed in seeds]
    expected = [
        post(gated.server, "/attention/grad", message(given | do, backend="triton"))
        for given, do in zip(whole, dos, strict=True)
    ]
    recalls = [message(do, saved=one.metadata["saved"]) for do, one in zip(dos, actual, strict=True)]
    with gated.busy(pool, HELD):
        queued = [gated.post(pool, "mate", body, "/attention/grad") for body in recalls]
        queued.append(gated.post(pool, "mate", message(whole[0] | dos[0], backend="triton"), "/attention/grad"))
    answers = [future.result() for future in queued]
    assert {answer.headers["x-batch-size"] for answer in answers} == {"4"}
    assert {answer.headers["x-backend"] for answer in answers} == {"triton"}
    assert [answer.body for answer in answers[:3]] == [answer.body for answer in expected]


def test_what_a_caller_who_leaves_has_saved_is_freed(gated, pool):
    with gated.busy(pool, HELD), gated.client(forward(1, save=True)) as waiting:
        pass  # the client leaves before its request starts
    gated.wait_dropped(waiting)
    with contextlib.ExitStack() as first:
        first.enter_context(gated.busy(pool, HELD))
        with gated.busy(pool, forward(2), "wait"), gated.client(forward(1, save=True)) as running:
            first.close()
            gated.wait_begun(running)  # then the client leaves, before its request ends
    wait_for(lambda: not saved(gated.server), lambda: "a forward is held that nobody has heard of")


@pytest.mark.parametrize(("name", "status", "code"), [("oom", 503, "out_of_memory"), ("bug", 500, "internal_error")])
def test_a_forward_that_fails_gives_its_memory_back(gated, pool, name, status, code):
    with gated.busy(pool, HELD):
        mate = gated.post(pool, "mate", forward(1, save=True))
        culprit = gated.post(pool, name, forward(2, save=True))
    problem(culprit.result(), status, code)
    assert mate.result().status == 200
    wait_for(lambda: saved(gated.server) == 1, lambda: saved(gated.server))


def test_a_deletion_waits_for_the_gradients_that_run(gated, pool):
    one = post(gated.server, "/attention", forward(1, save=True)).metadata["saved"]
    do = message({"do": normal(1, 2, 4, 16)}, saved=one)
    expected = post(gated.server, "/attention/grad", do).body
    with gated.busy(pool, do, path="/attention/grad") as running:
        deleted = pool.submit(ask, gated.server, f"/saved/{one}", "DELETE")
        wait_for(lambda: gated.inside() == 2, lambda: "the deletion is not inside")
        assert not deleted.done()
    assert running.result().body == expected
    assert deleted.result().status == 204
    problem(post(gated.server, "/attention/grad", do), 404, "saved_not_found")
