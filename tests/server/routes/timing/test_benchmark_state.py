"""The server stores the events of a benchmark, so that a client can reconnect and continue after Last-Event-ID."""

import asyncio
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_kernels.problems.cost import NOMINAL
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.messages import DeviceInfo, JobOpened, StartBenchmark
from flashpoint_server.refusal import Refusal
from flashpoint_server.routes.timing.benchmark_state import Benchmarks
from tests.support.messages import ask

GRID = {"shapes": [{"q_heads": 2, "q_len": 64, "head_dim": 16}], "max_seconds": 0.05, "warmup_ms": 1.0}


def test_events_go_on_where_a_listener_left_them(server, client):
    run = client.benchmark(**GRID, backends=["cpu", "tiled"])
    run.wait()
    whole = ask(server, f"/benchmark/{run.id}/events").body
    ids = re.findall(rb"^id: (\d+)$", whole, re.MULTILINE)
    middle = ids[len(ids) // 2]
    rest = ask(server, f"/benchmark/{run.id}/events", last_event_id=middle.decode()).body
    assert re.findall(rb"^id: (\d+)$", rest, re.MULTILINE) == ids[len(ids) // 2 + 1 :]
    assert whole.endswith(rest)


class Engines:
    """One engine, which hears messages, and opens benchmarks when the test says so."""

    def __init__(self):
        self.listeners, self.heard = [], []
        self.engine = SimpleNamespace(tell=self.heard.append)

    def least_loaded(self, load):
        load(self.engine)
        return self.engine

    def open_all(self):
        for start in self.heard:
            assert isinstance(start, StartBenchmark)
            for listener in self.listeners:
                listener.heard(self.engine, JobOpened(start.job, start.owner, start.request, start.created, 1))


def test_benchmarks_count_from_the_moment_that_they_are_sent_to_an_engine():
    """Two callers may have two of four each, though no engine has opened one when the others come."""

    async def run():
        engines = Engines()
        benchmarks = Benchmarks(Settings(benchmark_jobs=4), engines)
        device = DeviceInfo("cpu", "a test", 1 << 33, ("cpu",), 1e11, NOMINAL)
        request = BenchmarkRequest.model_validate(GRID | {"backends": ["cpu"]})
        sent = [asyncio.ensure_future(benchmarks.open(request, owner, device)) for owner in "aaabbbc"]
        await asyncio.wait(sent, timeout=0)
        engines.open_all()
        return await asyncio.gather(*sent, return_exceptions=True)

    *_, last = outcomes = asyncio.run(run())
    opened = [one.owner for one in outcomes if not isinstance(one, BaseException)]
    refused = [one.code for one in outcomes if isinstance(one, Refusal)]
    assert (opened, refused) == (["a", "a", "b", "b"], ["queue_full"] * 3), outcomes
    assert "4 benchmarks are queued or running, 0 of them yours" in last.detail
