"""A server follows its /openapi.json: schemathesis sends requests that the document allows, and others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.support.messages import JSON, ask, post

HERE = Path(__file__).parent


OPERATIONS = 37  # in the document; fewer would mean that some are not tested


SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"


@pytest.fixture(scope="module")
def bounded(start_server):
    """Start a server whose benchmarks and verifications are short."""
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
    """If a problem has no keys, lse is -inf, and a report in JSON writes it as a string, which the schema allows."""
    body = {"shape": {"q_len": 3, "kv_len": 0, "head_dim": 16}}
    report = post(server, "/verify", json.dumps(body).encode(), JSON).json
    assert {"worst_value": "-Infinity", "worst_expected": "-Infinity"}.items() <= report["tensors"][1].items()
    document = ask(server, "/openapi.json").json
    content = document["paths"]["/verify"]["post"]["responses"]["200"]["content"][JSON]
    jsonschema.Draft202012Validator(content["schema"] | {"components": document["components"]}).validate(report)
