"""NVIDIA's unmodified gRPC client, synchronous and asyncio, works for each call that the server supports."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.oip.cases import CASES, REFUSED, ask, judge
from tests.support.oip.grpc_calls import port_of

CLIENTS = Path(__file__).parent / "clients"


@pytest.mark.parametrize("kind", [pytest.param("sync", marks=pytest.mark.slow), "asyncio"])
def test_tritonclient(rpc_server, kind, tmp_path):
    program = [sys.executable, CLIENTS / "triton_grpc_client.py", kind]
    report, answers = ask(program, tmp_path, f"127.0.0.1:{port_of(rpc_server)}", CASES)
    statuses = {"422": "INVALID_ARGUMENT", "404": "NOT_FOUND", "504": "DEADLINE_EXCEEDED"}
    judge(report, answers, CASES, {name: (statuses[status], word) for name, (status, word) in REFUSED.items()})
    assert report["ready"] == [True, True, True]
    assert [tensor["name"] for tensor in report["metadata"]["inputs"]][:3] == ["q", "k", "v"]
    assert report["metadata"]["inputs"][0]["shape"] == ["-1"] * 4
    assert {"binary_tensor_data", "system_shared_memory"} <= set(report["server"]["extensions"])
    config = report["config"]["config"]
    assert config["name"] == "attention_grad"
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["dynamic_batching"]["priority_levels"] == "10"
    assert config["parameters"]["causal"]["string_value"] == "false"
    assert {model["name"]: model["state"] for model in report["index"]["models"]} == {
        "attention": "READY",
        "attention_grad": "READY",
    }
    counts = {model["name"]: int(model["inference_count"]) for model in report["stats"]["model_stats"]}
    assert counts["attention"] >= sum(one["model"] == "attention" for one in CASES) - 4
    assert report["async_infer"] == [CASES[0]["name"]] * 4
