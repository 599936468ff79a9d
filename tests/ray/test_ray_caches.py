"""KV caches on two replicas of Ray Serve, where calls of one header value go to one replica."""

import numpy as np
import pytest

import flashpoint
from tests.support.balancer import REPLICA
from tests.support.messages import ask
from tests.support.ray_cluster import deploy

# For `make test-cluster`: Ray's experimental router answers 500 to some calls (docs/scaling.md).
pytestmark = pytest.mark.full
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"  # as docs/scaling.md has it


def test_calls_of_one_value_go_to_one_replica():
    deployment = {"ray_actor_options": {"num_cpus": 1}, "request_router_config": {"request_router_class": ROUTER}}
    environment = {"RAY_SERVE_SESSION_ID_HEADER_KEY": REPLICA.lower()}
    k = np.zeros((1, 2, 3, 16), np.float32)
    sessions = [f"session-{n}" for n in range(12)]
    with deploy(2, deployment=deployment, environment=environment) as cluster:
        for session in sessions:
            with flashpoint.Client(cluster.url, replica=session, timeout=240) as client:
                cache = client.cache(kv_heads=2, head_dim=16)
                assert [cache.append(k, k) for _ in range(3)] == [3, 6, 9]
        held = [ask(cluster, "/caches", x_flashpoint_replica=session).json["caches"] for session in sessions]
    replicas = {tuple(cache["id"] for cache in caches) for caches in held}
    assert len(replicas) == 2
    assert sum(map(len, replicas)) == len(sessions)
