"""API keys with the right `benchmark` start, watch, plot and cancel benchmarks, within limits. Results are kept."""

import json
import re

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")


from flashpoint import BenchmarkJob
from tests.support.messages import JSON, SAFETENSORS, ask, post, problem, small
from tests.support.servers import wait_for

GOOD = small()


def test_rights_to_verify_and_to_time(strict):
    shape = {"q_heads": 2, "q_len": 8, "head_dim": 8}
    calls = {"/verify": json.dumps({"shape": shape}), "/benchmark": json.dumps(ENDLESS)}
    for path, body in calls.items():
        problem(post(strict, path, body.encode(), JSON), 401, "unauthorized")
        problem(post(strict, path, body.encode(), JSON, authorization="Bearer looker"), 403, "forbidden")
    assert post(strict, "/verify", calls["/verify"].encode(), JSON, authorization="Bearer verifier").json["ok"]
    job = post(strict, "/benchmark", calls["/benchmark"].encode(), JSON, authorization="Bearer verifier")
    assert job.status == 202
    cancel(strict, job, "verifier")
    problem(post(strict, "/attention", GOOD, authorization="Bearer verifier"), 403, "forbidden")


ENDLESS = {  # lasts for minutes: no case reaches the precision, so each runs 1,000 calls
    "shapes": [{"batch": 4, "q_heads": 4, "q_len": 1024, "head_dim": 32}] * 3,
    "max_seconds": 500.0, "relative_precision": 1e-9, "backends": ["naive"],
}  # fmt: skip


def cancel(server, job, key):
    """Cancel a benchmark, and wait until it has ended: its current measurement may continue after the answer."""
    where, given = job.headers["location"], {"authorization": f"Bearer {key}"}
    assert ask(server, where, "DELETE", **given).status == 200
    wait_for(lambda: ask(server, where, **given).json["state"] == "cancelled", lambda: "it goes on")


def test_one_caller_may_have_half_of_the_benchmarks(strict):
    """With benchmark_jobs=2, one caller may have one benchmark; its second one gets 429 until the first has ended."""
    body = json.dumps(ENDLESS).encode()
    first = post(strict, "/benchmark", body, JSON, **KEY)
    assert first.status == 202
    assert first.headers["location"] == f"/benchmark/{first.json['id']}"
    problem(post(strict, "/benchmark", body, JSON, **KEY), 429, "queue_full")
    cancel(strict, first, "all")
    cancel(strict, post(strict, "/benchmark", body, JSON, **KEY), "all")


KEY = {"authorization": "Bearer all"}


GRID = {"shapes": [{"q_heads": 2, "q_len": 64, "head_dim": 16}], "max_seconds": 0.05, "warmup_ms": 1.0}


def grid(server, **fields):
    return post(server, "/benchmark", json.dumps(GRID | fields).encode(), JSON)


def test_a_benchmark_is_timed_watched_drawn_and_kept(server, client):
    run = client.benchmark(**GRID, backends=["naive", "cpu"], directions=["forward", "backward"])
    events = list(run.events())
    ids = [event.id for event in events]
    assert ids == sorted(set(ids))
    assert [e.state for e in events if e.kind == "state"] == ["running", "done"]
    job = run.job()
    assert (job.state, job.done, job.total, len(job.rows)) == ("done", 4, 4, 4)
    assert all(row.ms > 0 and row.ms_p20 <= row.ms <= row.ms_p80 for row in job.rows)
    assert all(row.speedup_over_naive > 0 for row in job.rows if row.backend == "cpu")
    assert job.environment["torch"]
    state = BenchmarkJob(id=job.id, created=job.created, request=job.request)
    for event in events:
        state = state.after(event)
    assert state == job  # the events contain the whole result
    for kind in ("time", "roofline"):  # tests/e2e/page/test_benchmark.py draws all kinds
        answer = ask(server, f"/benchmark/{run.id}/plot.svg?kind={kind}")
        assert (answer.status, b"<svg" in answer.body[:2000]) == (200, True), kind
    answer = ask(server, f"/benchmark/{run.id}/plot.png")
    assert (answer.status, answer.body[:4]) == (200, b"\x89PNG")
    assert b"#14181f" in ask(server, f"/benchmark/{run.id}/plot.svg?theme=dark").body
    for wrong in ("kind=pie", "theme=pink"):
        assert ask(server, f"/benchmark/{run.id}/plot.svg?{wrong}").status == 422
    assert ask(server, f"/benchmark/{run.id}/plot.gif").status == 404
    assert run.cancel() == job  # the benchmark has ended, so nothing changes


def test_a_job_that_asks_too_much_is_told_the_bound(server):
    def refused(**fields):
        return problem(grid(server, **fields), 422, "invalid_request")["detail"]

    assert "over the limit of 2" in refused(shapes=[{"q_heads": 64, "q_len": 16384, "head_dim": 64}])
    assert "the limit of 512 cases" in refused(shapes=GRID["shapes"] * 600)
    assert "over the limit of 1800" in refused(shapes=GRID["shapes"] * 10, max_seconds=600.0)
    assert "is not one of" in refused(backends=["mine"])
    assert "twice" in refused(backends=["cpu"] * 1000)
    too_long = refused(shapes=[{"q_len": 1 << 27, "kv_len": 1, "head_dim": 64}])
    assert re.search(r"\d bytes \(64 GiB\), over the limit of \d+ bytes \([\d.]+ GiB\) for benchmarks", too_long)
    for detail in (too_long, refused(shapes=[{"q_heads": 64, "q_len": 16384, "head_dim": 64}])):
        assert re.search(r"; lengths of up to [1-9]\d* fit$", detail)
    document = problem(grid(server, shapes=[]), 422, "invalid_request")
    assert document["errors"] == [{"loc": ["request"], "msg": "name a preset, or shapes to time"}]
    hint = "unknown option or tensor; did you mean shapes?"
    assert problem(grid(server, shape=1), 422, "invalid_request")["errors"] == [{"loc": ["shape"], "msg": hint}]
    problem(post(server, "/benchmark", b'{"shapes": 3', JSON), 400, "malformed_body")
    problem(post(server, "/benchmark", b"{}", "text/plain"), 415, "unsupported_media_type")
    problem(post(server, "/benchmark", b"{}", SAFETENSORS), 415, "unsupported_media_type")
    problem(post(server, "/benchmark", b" " * (1 << 17), JSON), 413, "body_too_large")
    status, document = server.get("/benchmark/none")
    assert (status, document["code"]) == (404, "not_found")
