"""The statistics of a model count the requests that it has answered and refused, and their times."""

import asyncio

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from prometheus_client import CollectorRegistry

from flashpoint_server.http.request import Request
from flashpoint_server.oip.infer import Counted
from flashpoint_server.oip.statistics import Statistics, model_stats
from tests.support.oip.message import call, infer
from tests.support.oip.problem import GRAD, problem
from tests.support.servers import wait_for

MODELS = {"attention": ("o", "lse"), "attention_grad": ("dq", "dk", "dv", "dattn_mask", "dsinks")}


SMALL = problem()


def test_statistics_count_what_is_served(url):
    def stats():
        (statistics,) = call(url, "GET", "/v2/models/attention_grad/stats").head["model_stats"]
        assert (statistics["name"], statistics["version"]) == ("attention_grad", "1")
        return statistics

    before = stats()
    for _ in range(3):
        assert infer(url, "attention_grad", problem(names=GRAD)).status == 200
    assert infer(url, "attention_grad", SMALL).status == 422

    def counted():
        """Return the statistics if they include all four calls, or None: a call may be counted after its answer."""
        now = stats()
        both = now["inference_stats"], before["inference_stats"]
        more = [now["fail"]["count"] + now["success"]["count"] for now in both]
        return now if more[0] - more[1] >= 4 else None

    after = wait_for(counted, lambda: f"{stats()} after {before}")
    count, spent = after["inference_stats"], before["inference_stats"]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 3
    assert count["success"]["count"] - spent["success"]["count"] == 3
    assert count["fail"]["count"] - spent["fail"]["count"] == 1
    for part in ("success", "queue", "compute_infer"):
        assert count[part]["count"] - spent[part]["count"] == 3
        assert count[part]["ns"] > spent[part]["ns"]
    assert count["success"]["ns"] >= count["queue"]["ns"] + count["compute_infer"]["ns"]
    assert after["last_inference"] > before["last_inference"]
    assert sum(batch["compute_infer"]["count"] for batch in after["batch_stats"]) == after["execution_count"]
    everything = call(url, "GET", "/v2/models/stats").head["model_stats"]
    assert {model["name"] for model in everything} >= set(MODELS)


def test_a_launch_counts_though_some_of_its_requests_were_not_of_the_protocol():
    registry = CollectorRegistry()
    statistics, stages = Statistics(registry), dict.fromkeys(("queue", "copy_in", "compute", "copy_out"), 0.5)
    for requests, launches in ((1, 1), (2, 1), (3, 1), (4, 2)):
        statistics.computed("attention", 3, stages)
        statistics.ended("attention", True, 1.0)
        found = model_stats("attention", "1", registry.collect())
        assert (found["inference_count"], found["execution_count"]) == (requests, launches)


@pytest.mark.parametrize(
    ("status", "code", "how"),
    [(200, None, "success"), (200, "answer_timeout", "fail"), (499, "client_gone", "fail"), (422, "x", "fail")],
)
def test_an_answer_that_was_not_read_to_its_end_is_no_success(status, code, how):
    registry = CollectorRegistry()

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    request = Request.open(scope)

    async def app(scope, receive, send):
        request.status, request.code = status, code

    asyncio.run(Counted(app, Statistics(registry), "attention")(scope, None, None))
    stats = model_stats("attention", "1", registry.collect())["inference_stats"]
    assert {name: stats[name]["count"] for name in ("success", "fail")} == {"success": 0, "fail": 0} | {how: 1}
