"""Two replicas behind Ray's proxy or HAProxy answer and refuse requests; no call is lost when one replica is killed."""

import contextlib
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch

import flashpoint
from tests.support.messages import JSON, PROBLEM, message, post
from tests.support.oracle import answer, close, tensors
from tests.support.ray_cluster import END_SECONDS, ENGINE, deploy, wait_for

pytestmark = pytest.mark.slow  # the cluster takes 15 s to start
QUEUE_LIMIT = 4


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="proxy"), pytest.param(True, id="haproxy", marks=pytest.mark.full)]
)
def cluster(request):
    # Ray assumes two GPUs and gives each replica one; the replicas still compute on the CPU.
    each = {"ray_actor_options": {"num_cpus": 1, "num_gpus": 1}}
    with deploy(2, gpus=2, haproxy=request.param, deployment=each, queue_limit=QUEUE_LIMIT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def problem():
    """Return (tensors, expected output) of an attention call."""
    q, k, v = tensors(1, 4, 256, 64, n=3)
    t = {"q": q, "k": k, "v": v}
    return t, answer(t, {})["o"]


@contextlib.contextmanager
def stopped(engines):
    """Suspend the engine processes inside the block, so that requests which the replicas admit stay unanswered."""
    try:
        for engine in engines:
            engine.suspend()
        yield
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.resume()


def test_answers_are_exact_in_every_encoding(cluster):
    q, k, v, do = tensors(2, 4, 33, 16)
    expected = answer({"q": q, "k": k, "v": v, "do": do}, {"causal": True})
    with flashpoint.Client(cluster.url) as client:
        actual, meta = client.attention(q, k, v, causal=True, return_lse=True, request_id="mine", with_meta=True)
        close(actual[0], expected["o"])
        close(actual[1], expected["lse"])
        assert meta.request_id == "mine"
        for name, gradient in zip(("dq", "dk", "dv"), client.attention_grad(do, q, k, v, causal=True), strict=True):
            close(gradient, expected[name])
    body = json.dumps({"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), "causal": True}).encode()
    close(post(cluster, "/attention", body, JSON).json["o"], expected["o"])
    inputs = [
        {"name": n, "shape": list(t.shape), "datatype": "FP32", "data": t.flatten().tolist()}
        for n, t in (("q", q), ("k", k), ("v", v))
    ]
    body = json.dumps({"inputs": inputs, "parameters": {"causal": True}}).encode()
    (output,) = post(cluster, "/v2/models/attention/infer", body, JSON).json["outputs"]
    close(np.reshape(output["data"], output["shape"]), expected["o"])


def test_a_body_of_many_chunks_comes_whole(cluster):
    q, k, v = tensors(1, 4, 4096, 64, n=3)  # k and v have 4 MiB each
    q = q[:, :, :8].contiguous()
    reply = post(cluster, "/attention", message({"q": q, "k": k, "v": v}))
    close(reply.tensors["o"], answer({"q": q, "k": k, "v": v}, {})["o"])


def test_our_refusals_come_through(cluster):
    reply = post(cluster, "/attention", message({"q": torch.zeros(2, 3)}))
    assert (reply.status, reply.headers["content-type"]) == (422, PROBLEM)
    assert {error["loc"][0] for error in reply.json["errors"]} == {"k", "v"}
    assert post(cluster, "/v2/models/none/infer", b"{}", JSON).json.keys() == {"error"}


def test_each_replica_has_the_device_that_ray_gave_it(cluster):
    assert sorted(engine.environ()["CUDA_VISIBLE_DEVICES"] for engine in cluster.below(ENGINE)) == ["0", "1"]


def test_overload_is_refused_by_us_and_callers_that_wait_are_answered(cluster, problem):
    tensors, expected = problem
    body = message(tensors)
    count, max_inside = 5 * QUEUE_LIMIT, 2 * QUEUE_LIMIT  # more than both replicas admit
    with ThreadPoolExecutor(count) as threads:
        with stopped(cluster.below(ENGINE)):
            calls = [threads.submit(post, cluster, "/attention", body) for _ in range(count)]
            wait_for(lambda: sum(call.done() for call in calls) >= count - max_inside, lambda: "too many were let in")
        replies = [call.result() for call in calls]
    refused = {reply.body for reply in replies if reply.status not in (200, 429)}
    assert {reply.status for reply in replies} == {200, 429}, refused
    for reply in replies:
        if reply.status == 200:
            close(reply.tensors["o"], expected)
        else:
            assert (reply.json["code"], reply.headers["retry-after"]) == ("queue_full", "1")

    def call(_):
        with flashpoint.Client(cluster.url, retries=100, timeout=600) as client:
            return client.attention(**tensors)

    with ThreadPoolExecutor(3 * QUEUE_LIMIT) as threads:
        for o in threads.map(call, range(3 * QUEUE_LIMIT)):
            close(o, expected)


def test_a_killed_replica_loses_nothing(cluster, problem):
    """Kill a replica whose suspended engine has unanswered calls: the clients retry these calls, and none is lost."""
    tensors, expected = problem
    (victim, _), ready = cluster.replicas, cluster.ready
    below = victim.children(recursive=True)
    engines = [process for process in below if ENGINE in process.cmdline()]
    assert engines
    answered, over, retries = Counter(), threading.Event(), []

    def call(caller):
        with flashpoint.Client(cluster.url, retries=1000, timeout=600) as client:
            while not over.is_set():
                o, meta = client.attention(**tensors, with_meta=True)
                close(o, expected)
                answered[caller] += 1
                retries.append(meta.retries)

    callers = range(QUEUE_LIMIT)  # even one replica admits all of their calls, so no call is refused
    with ThreadPoolExecutor() as threads:
        try:
            calls = [threads.submit(call, caller) for caller in callers]
            wait_for(lambda: all(answered[caller] for caller in callers), lambda: "no answers")
            with stopped(engines):
                before = Counter(answered)
                overtaken = lambda: [answered[caller] - before[caller] for caller in callers]  # noqa: E731
                wait_for(lambda: max(overtaken()) - min(overtaken()) > 50, lambda: f"nobody waits: {overtaken()}")
                retries.clear()
                victim.kill()
            wait_for(lambda: any(retries) or any(c.done() for c in calls), lambda: "no call was sent again")
        finally:
            over.set()
        for each in calls:
            each.result()
    assert any(retries)
    assert not psutil.wait_procs(below, END_SECONDS)[1], "its engine outlived it"
    again = lambda: cluster.ready > ready and len(cluster.replicas) == 2  # noqa: E731
    wait_for(again, lambda: "no replica replaces it: " + "".join(cluster.lines))  # the other tests need two replicas
