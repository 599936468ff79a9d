"""A server does what its /openapi.json says: schemathesis sends requests that the document allows, and others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.messages import JSON, ask, post

HERE = Path(__file__).parent
OPERATIONS = 37  # in the document: with fewer, some would not be tested
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"


@pytest.fixture(scope="module")
def bounded(start_server):
    """A server whose benchmarks and verifications are short."""
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
def test_every_example_is_answered(server, path):
    """/docs shows them, to be sent with one click."""
    document = ask(server, "/openapi.json").json
    examples = document["paths"][path]["post"]["requestBody"]["content"][JSON]["examples"]
    assert examples
    for name, example in examples.items():
        answer = post(server, path, json.dumps(example["value"]).encode(), JSON)
        assert answer.status in (200, 202), (name, answer.body)
        if path == "/benchmark":
            ask(server, answer.headers["location"], "DELETE")
