"""A benchmark runs in slices between an engine's requests, and can be cancelled between two slices."""

import numpy as np

from tests.support.servers import wait_for


def test_traffic_goes_on_beside_a_benchmark_which_can_be_cancelled(server, client):
    """Requests are answered during a benchmark that would take minutes; then the benchmark is cancelled."""
    long = {"shapes": [{"batch": 4, "q_heads": 4, "q_len": 1024, "head_dim": 32}] * 3, "max_seconds": 500.0}
    run = client.benchmark(**long, backends=["naive"], relative_precision=1e-9)
    wait_for(lambda: run.job().state == "running", lambda: "it never began")
    q = np.ones((1, 2, 16, 8), np.float32)
    for _ in range(5):
        assert np.allclose(client.attention(q, q, q), 1.0)
    assert run.job().state == "running"
    assert run.cancel().state == "cancelled"
    assert [event.state for event in run.events() if event.kind == "state"][-1] == "cancelled"
