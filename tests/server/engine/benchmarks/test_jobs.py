"""A benchmark runs in slices between an engine's requests, and can be cancelled between two slices."""

import datetime

import numpy as np

from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_server.engine.benchmarks.jobs import BenchmarkJobs
from flashpoint_server.ipc.messages import StartBenchmark
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


def test_the_next_benchmark_is_of_the_caller_who_has_used_the_least():
    """The first caller's three benchmarks do not all come before the only one of the second caller."""
    jobs = BenchmarkJobs("cpu", slice_ms=5.0, keep=60.0)
    grid = {"shapes": [{"q_heads": 1, "q_len": 8, "head_dim": 8}], "max_seconds": 0.01, "warmup_ms": 0.0}
    request = BenchmarkRequest.model_validate(grid | {"backends": ["naive"]})
    text = request.model_dump_json(exclude_defaults=True).encode()
    created = datetime.datetime.now(datetime.UTC).isoformat()
    for name in ("a1", "a2", "a3", "b1"):
        jobs.hear(StartBenchmark(name, name[0], text, created))
    ended = []
    while jobs.active:
        jobs.begin()
        jobs.step()
        ended += [news.job for news in jobs.conclude() if b'"state":"done"' in news.event]
    assert list(dict.fromkeys(ended)) == ["a1", "b1", "a2", "a3"]
