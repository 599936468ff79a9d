"""A benchmark job is started once, watched and cancelled, by the synchronous and the asyncio client."""

import pytest

import flashpoint
from tests.support.verify_answers import EVENTS, JOB, ROW, SHAPES, says, streams

JSON = "application/json"
pytestmark = pytest.mark.usefixtures("delays")


def awaited(client, value):
    return value if isinstance(client, flashpoint.Client) else client.loop.run_until_complete(value)


def test_a_benchmark_is_submitted_watched_and_done(scripted, reach):
    done = JOB | {"state": "done", "rows": [ROW]}
    scripted.script.extend([says(JOB, 202), streams(EVENTS), says(done)])
    client = reach(scripted.url)
    run = client.benchmark(shapes=SHAPES, backends=["tiled"], causal=[False, True])
    job = awaited(client, run.wait())
    assert (run.id, job.state, job.rows[0].backend) == ("j1", "done", "tiled")
    (submitted, listened, looked) = scripted.requests
    assert (*submitted[:2], submitted[2]["Content-Type"]) == ("POST", "/benchmark", JSON)
    assert flashpoint.BenchmarkRequest.model_validate_json(submitted[3]).causal == (False, True)
    assert (*listened[:2], listened[2]["Accept"]) == ("GET", "/benchmark/j1/events", "text/event-stream")
    assert looked[:2] == ("GET", "/benchmark/j1")


def test_a_benchmark_is_cancelled(scripted, reach):
    scripted.script.append(says(JOB | {"state": "cancelled"}))
    client = reach(scripted.url)
    assert awaited(client, client.benchmark_run("j1").cancel()).state == "cancelled"
    assert scripted.requests[0][:2] == ("DELETE", "/benchmark/j1")


def test_a_benchmark_is_not_started_twice(scripted, reach):
    """The request is retried after a 429, but not after a lost connection: the server may have started the job."""
    scripted.script.extend([lambda h: h.problem(429), lambda h: h.vanish()])
    with pytest.raises(flashpoint.ConnectionFailedError):
        reach(scripted.url).benchmark(preset="papers")
    assert len(scripted.requests) == 2
