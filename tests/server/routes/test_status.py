"""/health, /info and /metrics show the state of the service."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.gated import GatedServer
from tests.support.messages import post, problem, refused_by_protocol, small
from tests.support.sockets import nothing_inside

GOOD = small()


def test_a_server_lives_before_it_is_ready_and_may_be_stopped_then(start_server, tmp_path):
    starting = GatedServer(start_server, tmp_path, closed=True).server  # the engine waits before it opens the device
    assert starting.get("/health/live") == (200, {"status": "ok"})
    status, overview = starting.get("/health")
    assert (status, overview["live"], overview["ready"]) == (200, True, False)
    assert "engine" in overview["reason"]
    status, document = starting.get("/health/ready")
    assert (status, document["code"]) == (503, "not_ready")
    refused_by_protocol(starting)
    answer = post(starting, "/attention", GOOD)
    problem(answer, 503, "not_ready")
    assert answer.headers["retry-after"]
    assert starting.get("/info")[1]["device"] is None
    starting.stop()


def test_info_says_what_it_is(server):
    status, info = server.get("/info")
    assert status == 200
    assert info["backends"] == ["cpu", "tiled", "reference"]
    assert info["device"]["name"] == "cpu"
    assert info["versions"]["torch"] == torch.__version__
    assert "softcap" in info["options"]["cpu"]  # the C kernels of backend cpu support it
    assert all("wide_head_dim" in info["options"][name] for name in info["backends"])
    assert info["limits"]["head_dim"] == 576
    assert info["limits"]["body_bytes"] == 1 << 30
    nothing_inside(server)  # this helper reads `load` of /info


def test_health_in_one_answer(server):
    assert server.get("/health") == (200, {"status": "ok", "live": True, "ready": True, "reason": None})
