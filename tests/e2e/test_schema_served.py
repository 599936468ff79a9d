"""What /openapi.json says is what a server does: schemathesis sends what the document allows, and what it does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
OPERATIONS = 23  # of the document; fewer would mean that some are no longer seen
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"


@pytest.fixture(scope="module")
def bounded(start_server):
    """A server whose benchmarks and verifications end within what a test may take."""
    return start_server(benchmark_seconds=2, verify_flops=10**8)


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
        timeout=300,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(report.read_text())
    assert found["complete"]
    assert found["operations"]["tested"] == found["operations"]["total"] == OPERATIONS
    assert {phase["status"] for phase in found["phases"].values()} == {"success"}
    assert not any(found["warnings"].values())
    assert not [line for line in bounded.lines if line.get("event") == "failed"]


@pytest.mark.parametrize(
    "path",
    [
        "/attention",
        "/attention/grad",
        "/verify",
        "/benchmark",
        *(f"/v2/models/{model}/infer" for model in ("attention", "attention_grad")),
    ],
)
def test_every_example_is_answered(bounded, path):
    """As /docs has it, to be sent with one click."""
    document = httpx.get(f"{bounded.url}/openapi.json").json()
    examples = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert examples
    for name, example in examples.items():
        answer = httpx.post(f"{bounded.url}{path}", json=example["value"])
        assert answer.is_success, (name, answer.text)
