"""`flashpoint loadtest` puts load on a real server, and fails for wrong answers and errors, not for overload."""

import json

import numpy as np
import pytest

from flashpoint.commands import loadtest


def test_each_step_is_counted_and_written(run, server, tmp_path):
    flags = ("--url", server.url, "--callers", "1,3", "--seconds", "0.3", "--json", tmp_path / "load.json")
    code, out, err = run("loadtest", *flags)
    assert (code, err) == (0, "")
    assert "every answer is right" in out
    document = json.loads((tmp_path / "load.json").read_text())
    assert document["url"] == server.url
    assert [step["callers"] for step in document["steps"]] == [1, 3]
    for step in document["steps"]:
        assert step["right"] > 0
        assert 0 < step["p50_ms"] <= step["p95_ms"] <= step["p99_ms"]
        assert step["errors"] == {}


def test_a_wrong_answer_ends_with_1(run, server, monkeypatch):
    exact = loadtest.exact

    def other(tensors):
        return {name: right + (name == "dk") for name, right in exact(tensors).items()}

    monkeypatch.setattr(loadtest, "exact", other)
    code, out, _ = run("loadtest", "--url", server.url, "--callers", "1", "--seconds", "0.3")
    assert code == 1
    assert "x wrong answer: dk is wrong by" in out
    assert out.endswith("FAIL: answers are wrong\n")


def test_the_verdict_says_why_it_fails_and_what_a_key_limits():
    assert loadtest.verdict({}, 9) == (None, None)
    assert loadtest.verdict({"429 queue_full": 3, "503 draining": 1}, 9) == (None, None)
    failed, note = loadtest.verdict({"429 key_limit": 3}, 9)
    assert failed is None
    assert note == "key_limit is a limit of this API key: the server may answer more"
    failed, _ = loadtest.verdict({"429 queue_full": 3, "ConnectionFailedError": 7, "500 internal_error": 1}, 9)
    assert (
        failed == "calls failed, and not by overload: ConnectionFailedError, 500 internal_error; read the server's log"
    )
    assert loadtest.verdict({"503 draining": 3}, 0)[0] == "no call was answered"
    assert loadtest.verdict({"ConnectionFailedError": 7, "wrong answer: dk is wrong": 1}, 9)[0] == "answers are wrong"


def test_a_busy_program_is_named_as_a_limit_only_if_the_server_answered():
    answered, silent = {"right": 9, "cores_of_this_program": 0.95}, {"right": 0, "cores_of_this_program": 1.0}
    idle = {"right": 9, "cores_of_this_program": 0.5}
    assert loadtest.own_limit([idle, answered]).startswith("this program was busy all the time")
    assert loadtest.own_limit([idle, silent]) is None
    assert loadtest.own_limit([]) is None


def test_an_overload_is_counted_and_is_no_failure(run, start_server):
    server = start_server(queue_limit=1)
    code, out, _ = run("loadtest", "--url", server.url, "--callers", "6", "--seconds", "0.5")
    assert code == 0, out
    assert "x 429 queue_full" in out
    assert out.endswith("every answer is right\n")


def test_the_expected_answers_are_those_of_attention():
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal((1, heads, 3, 64)) for name, heads in {"q": 4, "k": 2, "v": 2, "do": 4}.items()
    }

    def loss(q, k, v):
        return (loadtest.exact({"q": q, "k": k, "v": v})["o"] * tensors["do"]).sum()

    gradients = loadtest.exact(tensors)
    for name in "qkv":
        place, step = (0, 1, 1, 5), 1e-6
        moved = [{each: tensors[each].copy() for each in "qkv"} for _ in range(2)]
        moved[0][name][place] += step
        moved[1][name][place] -= step
        slope = (loss(**moved[0]) - loss(**moved[1])) / (2 * step)
        assert gradients[f"d{name}"][place] == pytest.approx(slope, abs=1e-7)
