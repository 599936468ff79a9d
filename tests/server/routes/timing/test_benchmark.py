"""Benchmarks are started, watched, drawn, kept and cancelled, by keys with the right and within bounds."""

import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.messages import JSON, ask, post, problem, small
from tests.support.servers import wait_for

GOOD = small()


def test_rights_to_verify_and_to_time(strict):
    shape = {"q_heads": 2, "q_len": 8, "head_dim": 8}
    calls = {"/verify": json.dumps({"shape": shape}), "/benchmark": json.dumps(ENDLESS)}
    for path, body in calls.items():
        problem(post(strict, path, body.encode(), JSON), 401, "unauthorized")
        problem(post(strict, path, body.encode(), JSON, authorization="Bearer looker"), 403, "forbidden")
    assert post(strict, "/verify", calls["/verify"].encode(), JSON, authorization="Bearer prover").json["ok"]
    job = post(strict, "/benchmark", calls["/benchmark"].encode(), JSON, authorization="Bearer prover")
    assert job.status == 202
    cancel(strict, job, "prover")
    problem(post(strict, "/attention", GOOD, authorization="Bearer prover"), 403, "forbidden")


ENDLESS = {  # 1,000 calls of each case take minutes
    "shapes": [{"batch": 4, "q_heads": 4, "q_len": 1024, "head_dim": 32}] * 3,
    "max_seconds": 500.0, "relative_precision": 1e-9, "backends": ["naive"],
}  # fmt: skip


def cancel(server, job, key):
    """Cancel a benchmark and wait for its end: the answer may come before its slice ends."""
    where, given = job.headers["location"], {"authorization": f"Bearer {key}"}
    assert ask(server, where, "DELETE", **given).status == 200
    wait_for(lambda: ask(server, where, **given).json["state"] == "cancelled", lambda: "it goes on")


def test_one_caller_may_have_half_of_the_benchmarks(strict):
    """Two benchmarks may run: the caller's second one gets 429 until the first has ended."""
    body = json.dumps(ENDLESS).encode()
    first = post(strict, "/benchmark", body, JSON, **KEY)
    assert first.status == 202
    assert first.headers["location"] == f"/benchmark/{first.json['id']}"
    problem(post(strict, "/benchmark", body, JSON, **KEY), 429, "queue_full")
    cancel(strict, first, "all")
    cancel(strict, post(strict, "/benchmark", body, JSON, **KEY), "all")


KEY = {"authorization": "Bearer all"}
