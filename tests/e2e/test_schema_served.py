"""A server behaves as its /openapi.json says: schemathesis sends valid and invalid requests and checks the answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.support.messages import JSON, ask, post

HERE = Path(__file__).parent


OPERATIONS = 37  # in /openapi.json; a smaller number would mean that schemathesis did not find some


SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"


@pytest.fixture(scope="module")
def bounded(start_server):
    """Start a server with low limits for benchmarks and verifications, so that random ones are short."""
    return start_server(benchmark_seconds=2, verify_flops=10**8)


@pytest.mark.slow
def test_schemathesis_finds_nothing(bounded, tmp_path):
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [
            SCHEMATHESIS, "--config-file", HERE / "schemathesis.toml", "run", "--no-color",
            "--report", "json", "--report-json-path", report, f"{bounded.url}/openapi.json",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads(report.read_text())
    assert document["complete"]
    assert document["operations"]["tested"] == document["operations"]["total"] == OPERATIONS
    assert {phase["status"] for phase in document["phases"].values()} == {"success"}
    assert not any(document["warnings"].values())
    assert not [line for line in bounded.lines if line.get("event") == "failed"]


def test_infinite_values_of_a_report_fit_the_schema(server):
    """The schema allows infinities in a report. Without keys, lse is -inf, which JSON has as the string "-Infinity"."""
    body = {"shape": {"q_len": 3, "kv_len": 0, "head_dim": 16}}
    report = post(server, "/verify", json.dumps(body).encode(), JSON).json
    assert {"worst_value": "-Infinity", "worst_expected": "-Infinity"}.items() <= report["tensors"][1].items()
    document = ask(server, "/openapi.json").json
    content = document["paths"]["/verify"]["post"]["responses"]["200"]["content"][JSON]
    jsonschema.Draft202012Validator(content["schema"] | {"components": document["components"]}).validate(report)
