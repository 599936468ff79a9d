"""NVIDIA's unmodified HTTP client, synchronous and asyncio, works for each call that the server supports."""

import sys
from pathlib import Path

import pytest

from tests.support.oip.cases import CASES, COMPRESSED, ask, judge

PROGRAM = Path(__file__).parent / "clients" / "triton_client.py"


@pytest.mark.parametrize("kind", ["sync", pytest.param("asyncio", marks=pytest.mark.slow)])
def test_tritonclient(url, kind, tmp_path):
    cases = [*CASES, *COMPRESSED]
    report, answers = ask([sys.executable, PROGRAM, kind], tmp_path, url, cases)
    judge(report, answers, cases)
    assert report["ready"] == [True, True, True]
    assert report["metadata"] == "attention"
    assert "binary_tensor_data" in report["extensions"]
    assert report["config"] == "attention_grad"
    assert {"attention", "attention_grad"} <= set(report["index"])
    counts = {model["name"]: model["inference_count"] for model in report["stats"]["model_stats"]}
    assert counts["attention"] >= sum(one["model"] == "attention" for one in cases) - 3
    assert report["async_infer"] == [cases[0]["name"]] * 4
