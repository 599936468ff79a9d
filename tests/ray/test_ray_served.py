"""The service on two replicas, behind Ray's own proxy and behind HAProxy: answers, refusals, a replica's end."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch

import flashpoint
from tests.support.dense_attention import close, dense, tensors
from tests.support.messages import JSON, PROBLEM, message, post
from tests.support.ray_cluster import END_SECONDS, ENGINE, deploy, wait_for

QUEUE_LIMIT = 4


# A second Ray of its own takes as long again.
@pytest.fixture(
    scope="module", params=[pytest.param(False, id="proxy"), pytest.param(True, id="haproxy", marks=pytest.mark.full)]
)
def cluster(request):
    # Two GPUs that are not there: Ray gives each replica one, and the replicas compute on the CPU all the same.
    each = {"ray_actor_options": {"num_cpus": 1, "num_gpus": 1}}
    with deploy(2, gpus=2, haproxy=request.param, deployment=each, queue_limit=QUEUE_LIMIT) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slow():
    """A request that takes a while, and its answer."""
    q, k, v = tensors(1, 4, 768, 64, n=3)
    return {"q": q, "k": k, "v": v}, dense(q, k, v)[0]


def test_answers_are_exact_in_every_encoding(cluster):
    q, k, v, do = tensors(2, 4, 33, 16)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o, lse = dense(*leaves, causal=True)
    expected = torch.autograd.grad(o, leaves, do.double())
    with flashpoint.Client(cluster.url) as client:
        found, meta = client.attention(q, k, v, causal=True, return_lse=True, request_id="mine", with_meta=True)
        close(found[0], o)
        close(found[1], lse)
        assert meta.request_id == "mine"
        for gradient, truth in zip(client.attention_grad(do, q, k, v, causal=True), expected, strict=True):
            close(gradient, truth)
    body = json.dumps({"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), "causal": True}).encode()
    close(post(cluster, "/attention", body, JSON).json["o"], o)
    inputs = [
        {"name": n, "shape": list(t.shape), "datatype": "FP32", "data": t.flatten().tolist()}
        for n, t in (("q", q), ("k", k), ("v", v))
    ]
    body = json.dumps({"inputs": inputs, "parameters": {"causal": True}}).encode()
    (answer,) = post(cluster, "/v2/models/attention/infer", body, JSON).json["outputs"]
    close(np.reshape(answer["data"], answer["shape"]), o)


def test_a_body_of_many_chunks_comes_whole(cluster):
    q, k, v = tensors(1, 4, 4096, 64, n=3)  # 4 MiB each
    q = q[:, :, :8].contiguous()
    reply = post(cluster, "/attention", message({"q": q, "k": k, "v": v}))
    close(reply.tensors["o"], dense(q, k, v)[0])


def test_our_refusals_come_through(cluster):
    reply = post(cluster, "/attention", message({"q": torch.zeros(2, 3)}))
    assert (reply.status, reply.headers["content-type"]) == (422, PROBLEM)
    assert {error["loc"][0] for error in reply.json["errors"]} == {"k", "v"}
    assert post(cluster, "/v2/models/none/infer", b"{}", JSON).json.keys() == {"error"}


def test_each_replica_has_the_device_that_ray_gave_it(cluster):
    assert sorted(engine.environ()["CUDA_VISIBLE_DEVICES"] for engine in cluster.below(ENGINE)) == ["0", "1"]


def test_overload_is_refused_by_us_and_ends_well_for_who_waits(cluster, slow):
    tensors, expected = slow
    body = message(tensors, backend="reference")
    with ThreadPoolExecutor(5 * QUEUE_LIMIT) as threads:  # more than twice what both let in
        replies = list(threads.map(lambda _: post(cluster, "/attention", body), range(5 * QUEUE_LIMIT)))
    refused = {reply.body for reply in replies if reply.status not in (200, 429)}
    assert {reply.status for reply in replies} == {200, 429}, refused
    for reply in replies:
        if reply.status == 200:
            close(reply.tensors["o"], expected)
        else:
            assert (reply.json["code"], reply.headers["retry-after"]) == ("queue_full", "1")

    def call(_):
        with flashpoint.Client(cluster.url, retries=100, timeout=300) as client:
            return client.attention(**tensors, backend="reference")

    with ThreadPoolExecutor(3 * QUEUE_LIMIT) as threads:
        for o in threads.map(call, range(3 * QUEUE_LIMIT)):
            close(o, expected)


def test_a_killed_replica_loses_nothing(cluster, slow):
    tensors, expected = slow
    (victim, _), retries = cluster.replicas, []
    below = victim.children(recursive=True)
    assert any(ENGINE in process.cmdline() for process in below)

    def call():
        with flashpoint.Client(cluster.url, retries=100, timeout=300) as client:
            o, meta = client.attention(**tensors, backend="reference", with_meta=True)
        retries.append(meta.retries)
        return o

    with ThreadPoolExecutor(6) as threads:  # three a replica
        answers = [threads.submit(call) for _ in range(24)]
        wait_for(lambda: len(retries) >= 6, lambda: "no answers")
        os.kill(victim.pid, signal.SIGKILL)
        for answer in answers:
            close(answer.result(), expected)
    assert sum(retries), "nothing was inside of the replica that was killed"
    assert not psutil.wait_procs(below, END_SECONDS)[1], "its engine outlived it"
