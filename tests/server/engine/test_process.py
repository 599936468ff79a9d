"""An engine process that is killed, stopped or short of memory fails only the requests that it runs."""

import concurrent.futures
import json
import os
import resource
import signal

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import psutil

from flashpoint_server.processes.parent import NICENESS
from tests.conftest import DEVICE
from tests.support.constant_answers import wide
from tests.support.messages import JSON, message, normal, post, problem, small
from tests.support.servers import wait_for
from tests.support.sockets import nothing_inside

SMALL = small()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's engine computes on no core")
def test_every_thread_of_an_engine_leaves_the_cores_to_http_first(server):
    post(server, "/attention", message({name: normal(1, 2, 512, 64) for name in "qkv"}))
    threads = [int(thread) for thread in os.listdir(f"/proc/{server.engine_pid}/task")]
    http = os.getpriority(os.PRIO_PROCESS, server.pid)
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {http + NICENESS}


@pytest.mark.skipif(DEVICE != "cpu", reason="its figure of memory is this machine's")
def test_caches_that_may_take_more_than_the_memory_are_a_warning_with_both_figures(start_server, server):
    roomy = start_server(cache_bytes="90000GiB")
    line = roomy.wait_for_line(lambda line: line["event"] == "--cache-bytes is more than the memory")
    assert line["level"] == "warning"
    assert line["cache_bytes"] == 90_000 << 30
    assert line["memory"] == server.get("/info")[1]["device"]["memory"]
    assert not [line for line in server.lines if line["event"].startswith("--cache-bytes")]


def test_a_killed_engine_costs_what_it_had_begun_and_no_more(gated):
    """If an engine is killed, its running request gets 503 and its benchmark fails; the next engine runs all others."""
    server, engine = gated.server, gated.server.engine_pid
    before, alone = post(server, "/attention", SMALL), small(backend="reference")
    timed = {"shapes": [{"q_len": 8, "head_dim": 8}], "backends": ["naive"]}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with gated.busy(pool, alone) as running:
            waiting = [gated.post(pool, "waits", alone) for _ in range(6)]
            benchmark = post(server, "/benchmark", json.dumps(timed).encode(), JSON)
            assert benchmark.status == 202
            gated.gate("closed").touch()  # makes the next engine wait at its start
            os.kill(engine, signal.SIGKILL)
            problem(running.result(), 503, "engine_lost")
            assert running.result().headers["retry-after"]
            wait_for(lambda: server.get("/health/ready")[0] == 503, lambda: "ready without an engine")
            problem(post(server, "/attention", SMALL), 503, "not_ready")
            assert server.get("/health/live")[0] == 200
            gated.gate("closed").unlink()
        assert all(answer.result().status == 200 for answer in waiting)
    server.wait_ready()
    assert server.engine_pid != engine
    assert not psutil.pid_exists(engine)  # not even as a zombie
    job = server.get(benchmark.headers["location"])[1]
    assert (job["state"], job["errors"]) == ("failed", ["the engine died"])
    assert post(server, "/attention", SMALL).body == before.body
    nothing_inside(server)


def test_a_stopped_engine_is_not_ready_and_answers_when_it_goes_on(server):
    """While the engine is stopped by SIGSTOP, the server is not ready. After SIGCONT, it answers waiting requests."""
    engine, before = server.engine_pid, post(server, "/attention", SMALL)
    nothing_inside(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_for(lambda: server.get("/health/ready")[0] == 503, lambda: "ready, with an engine that does nothing")
            assert "stopped" in server.get("/health/ready")[1]["detail"]
            assert server.get("/v2/health/ready")[0] == 503
            assert server.get("/v2/models/attention/ready")[0] == 503
            waits = pool.submit(post, server, "/attention", SMALL)
            wait_for(lambda: server.get("/info")[1]["load"]["requests"] == 1, lambda: "it never got in")
        finally:
            os.kill(engine, signal.SIGCONT)
        assert waits.result().body == before.body
    server.wait_ready()
    assert server.engine_pid == engine


def test_an_engine_that_cannot_map_a_segment_drops_it_and_serves_on(gated):
    """If the engine cannot map the memory of a request, this request gets 503, and later ones are answered."""
    server, engine = gated.server, gated.server.engine_pid
    # The engine may first release idle memory of other tests, at most 80 MiB.
    room = psutil.Process(engine).memory_info().vms + (16 << 20)
    before = resource.prlimit(engine, resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    try:
        problem(post(server, "/attention", wide(1, 1 << 15)), 503, "out_of_memory")  # needs 128 MiB
    finally:
        resource.prlimit(engine, resource.RLIMIT_AS, before)
    server.wait_ready()
    assert post(server, "/attention", SMALL).status == 200
    assert server.engine_pid == engine
    nothing_inside(server)
