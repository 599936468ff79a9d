"""Ray adds and removes replicas with the load, and refuses calls over its limits. `make test-cluster` takes minutes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import flashpoint
from tests.support.messages import message, post
from tests.support.oracle import answer, close, tensors
from tests.support.ray_cluster import ENGINE, deploy, wait_for

pytestmark = pytest.mark.full
PATIENCE = 900  # seconds for Ray to scale on a busy machine


@pytest.fixture(scope="module")
def slow():
    """Return (tensors, expected output) of an attention call that takes long to compute."""
    q, k, v = tensors(1, 4, 768, 64, n=3)
    return {"q": q, "k": k, "v": v}, answer({"q": q, "k": k, "v": v}, {})["o"]


class Callers:
    """`count` threads, each of which sends one call after another without retries. `end` raises their errors."""

    def __init__(self, cluster, slow, count):
        self._cluster, (self._tensors, self._expected) = cluster, slow
        self._enough = threading.Event()
        self._threads = ThreadPoolExecutor(count)
        self._calling = [self._threads.submit(self._call) for _ in range(count)]

    def _call(self):
        answered = 0
        with flashpoint.Client(self._cluster.url, retries=0) as client:
            while not self._enough.is_set():
                close(client.attention(**self._tensors, backend="reference"), self._expected)
                answered += 1
        return answered

    def failed(self):
        return any(call.done() for call in self._calling)

    def end(self):
        """Stop the threads and return the number of answered calls. Raises the first error of a thread, if any."""
        self._enough.set()
        with self._threads:
            return sum(call.result() for call in self._calling)


# Ray's replicas and proxies report their request counts, on which autoscaling depends, every 0.5 s.
OFTEN = {f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5" for who in ("REPLICA", "HANDLE")}


def scaled(target_seconds, **options):
    """Return a configuration for Ray's autoscaler: at most two replicas, with decisions within seconds."""
    policy = "flashpoint_server.autoscaling:OngoingAndWaiting"
    return {
        "max_replicas": 2,
        "look_back_period_s": 3,
        "upscale_delay_s": 1,
        "policy": {"policy_function": policy, "policy_kwargs": {"target_seconds": target_seconds}},
        **options,
    }


@pytest.mark.parametrize("haproxy", [False, True], ids=["proxy", "haproxy"])
def test_replicas_come_and_go_under_load_and_nothing_is_dropped(slow, haproxy):
    autoscaling = scaled(60, min_replicas=1, target_ongoing_requests=3, downscale_delay_s=3)
    stays = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3"}
    with deploy(haproxy=haproxy, deployment={"autoscaling_config": autoscaling}, environment=OFTEN | stays) as cluster:
        many = Callers(cluster, slow, 5)
        wait_for(lambda: cluster.ready == 2 or many.failed(), lambda: "".join(cluster.lines), seconds=PATIENCE)
        few = Callers(cluster, slow, 2)
        assert many.end() > 0
        assert cluster.ready == 2
        wait_for(lambda: len(cluster.replicas) == 1 or few.failed(), lambda: "".join(cluster.lines), seconds=PATIENCE)
        assert few.end() > 0
        assert len(cluster.replicas) == 1


def test_a_wait_alone_brings_another_replica(slow):
    """Ray adds a replica when the predicted wait exceeds `target_seconds`, although the number of requests is low."""
    autoscaling = scaled(0.01, target_ongoing_requests=1000)
    with deploy(deployment={"autoscaling_config": autoscaling}, environment=OFTEN) as cluster:
        callers = Callers(cluster, slow, 8)
        wait_for(lambda: cluster.ready == 2 or callers.failed(), lambda: "".join(cluster.lines), seconds=PATIENCE)
        callers.end()
        assert cluster.ready == 2


@pytest.mark.parametrize("haproxy", [False, True], ids=["proxy", "haproxy"])
def test_where_ray_refuses_it_says_when_to_ask_again(slow, haproxy):
    limits = {"max_ongoing_requests": 1, "max_queued_requests": 1}
    with deploy(haproxy=haproxy, deployment=limits) as cluster, ThreadPoolExecutor(8) as threads:
        body = message(slow[0], backend="reference")
        (engine,) = cluster.below(ENGINE)
        engine.suspend()  # admitted requests stay unanswered
        try:
            posted = [threads.submit(post, cluster, "/attention", body) for _ in range(8)]
            wait_for(lambda: sum(call.done() for call in posted) >= 6, lambda: "too many were let in")
        finally:
            engine.resume()
        replies = [call.result() for call in posted]
        assert {reply.status for reply in replies} == {200, 503}
        for reply in replies:
            if reply.status == 503:
                assert reply.headers["retry-after"] == "1"
        with flashpoint.Client(cluster.url, retries=1000, timeout=600) as client:
            calls = [threads.submit(client.attention, **slow[0], backend="reference") for _ in range(8)]
            for call in calls:
                close(call.result(), slow[1])
