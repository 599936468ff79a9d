"""Behind a cache, every caller gets its own answer, and the present one."""

import contextlib
import json
import os
import signal

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.balancer import caching_nginx, require, varnish
from tests.support.caches import SHAPE, appended, bearer, created, kv
from tests.support.messages import JSON, ask, message, post
from tests.support.servers import wait_for

CACHES = {"nginx": ("nginx", caching_nginx), "varnish": ("varnishd", varnish)}


@pytest.fixture(params=CACHES, scope="module")
def cached(request, tmp_path_factory):
    """Return a function that starts a cache in front of a server, as a context manager."""
    program, start = CACHES[request.param]
    require(program)
    return lambda server: start(server, tmp_path_factory.mktemp(program))


def test_no_key_reads_what_another_key_was_answered(cached, cache_server):
    one = created(cache_server)[0]
    appended(cache_server, one, *kv(3, seed=1))
    with cached(cache_server) as proxy:
        tensors = f"/caches/{one}/tensors?layer=0"
        assert [ask(proxy, path, **bearer("alice")).status for path in (tensors, "/caches", f"/caches/{one}")] == [
            200
        ] * 3
        assert [ask(proxy, path, **bearer("bob")).status for path in (tensors, f"/caches/{one}")] == [404] * 2
        assert ask(proxy, "/caches", **bearer("bob")).json["caches"] == []
        assert [ask(proxy, path).status for path in (tensors, "/caches", f"/caches/{one}")] == [401] * 3
        assert ask(proxy, tensors, **bearer("alice")).status == 200
    ask(cache_server, f"/caches/{one}", "DELETE", **bearer("alice"))


def test_without_keys_each_answer_is_the_present_one(cached, server):
    with cached(server) as proxy:
        assert ask(proxy, "/caches/cunknown").status == 404
        one = post(proxy, "/caches", json.dumps(SHAPE).encode(), JSON).json["caches"][0]["id"]
        for count in (2, 4):
            k, v = kv(2, seed=count)
            assert post(proxy, f"/caches/{one}/append", message({"k": k[0], "v": v[0]})).json == {"length": count}
            assert ask(proxy, f"/caches/{one}").json["lengths"] == [count, 0]
            assert ask(proxy, f"/caches/{one}/tensors").tensors["k"].shape[2] == count
        assert ask(proxy, f"/caches/{one}", "DELETE").status == 204
        assert [ask(proxy, f"/caches/{one}{below}").status for below in ("", "/tensors")] == [404] * 2
        counted = [ask(proxy, "/metrics").body for _ in range(2)]
        assert counted[0] != counted[1]
        grid = {"shapes": [{"q_len": 8, "head_dim": 8}], "dtypes": ["float32"], "directions": ["forward"]}
        started = post(proxy, "/benchmark", json.dumps(grid).encode(), JSON)
        assert started.status == 202, started
        path = f"/benchmark/{started.json['id']}"
        wait_for(lambda: ask(proxy, path).json["state"] == "done", lambda: ask(server, path).json)


def test_readiness_is_the_present_one(cached, start_server):
    server = start_server()
    engine = server.engine_pid
    with cached(server) as proxy:
        for path in ("/health/ready", "/v2/health/ready"):
            assert ask(proxy, path).status == 200
        os.kill(engine, signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            stack.callback(os.kill, engine, signal.SIGCONT)
            wait_for(lambda: ask(server, "/health/ready").status == 503, lambda: "still ready")
            assert [ask(proxy, path).status for path in ("/health/ready", "/v2/health/ready")] == [503] * 2
        wait_for(lambda: ask(server, "/health/ready").status == 200, lambda: "not ready again")
        assert ask(proxy, "/health/ready").status == 200
