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
OPERATIONS = 37  # in the document: with fewer, some would not be tested
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
    """Without keys lse is -inf, which a report in JSON writes as a string."""
    body = {"shape": {"q_len": 3, "kv_len": 0, "head_dim": 16}}
    report = post(server, "/verify", json.dumps(body).encode(), JSON).json
    assert {"worst_value": "-Infinity", "worst_expected": "-Infinity"}.items() <= report["tensors"][1].items()
    document = ask(server, "/openapi.json").json
    content = document["paths"]["/verify"]["post"]["responses"]["200"]["content"][JSON]
    jsonschema.Draft202012Validator(content["schema"] | {"components": document["components"]}).validate(report)


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
    """/docs shows them, and a reader can send them with one click."""
    document = ask(server, "/openapi.json").json
    examples = document["paths"][path]["post"]["requestBody"]["content"][JSON]["examples"]
    assert examples
    for name, example in examples.items():
        answer = post(server, path, json.dumps(example["value"]).encode(), JSON)
        assert answer.status in (200, 202), (name, answer.body)
        if path == "/benchmark":
            ask(server, answer.headers["location"], "DELETE")


WRONG = {  # requests that get an operation's example: code, method, path, body, headers
    "an option": ("invalid_request", "POST", "/attention", b'{"q":[[1]],"k":[[1]],"v":[[1]],"casual":true}', {}),
    "a tensor": ("invalid_request", "POST", "/attention/grad", b'{"q":[[1]],"k":[[1]],"v":[[1]],"dout":[[1]]}', {}),
    "a shape": ("invalid_request", "POST", "/verify", b'{"shape":{"q_len":64}}', {}),
    "a preset": ("invalid_request", "POST", "/benchmark", b'{"preset":"paper"}', {}),
    "a list": ("invalid_request", "POST", "/caches", b'{"layers":4,"kv_heads":[1,2]}', {}),
    "no ids": ("invalid_request", "POST", "/caches/delete", b"{}", {}),
    "an event": ("invalid_request", "GET", "/benchmark/{id}/events", None, {"last_event_id": "first"}),
    "a plot": ("invalid_request", "GET", "/benchmark/{id}/plot.{format}?kind=pie", None, {}),
    "a deadline": ("invalid_request", "GET", "/caches", None, {"x_timeout_ms": "soon"}),
    "half a body": ("malformed_body", "POST", "/attention", b'{"q":[[1,0]]', {}),
    "an answer": ("not_acceptable", "POST", "/attention", b"{}", {"accept": "text/html"}),
    "a type": ("unsupported_media_type", "POST", "/attention", b"{}", {"content_type": "text/plain"}),
    "a benchmark": ("not_found", "GET", "/benchmark/{id}", None, {}),
    "a cache": ("cache_not_found", "GET", "/caches/{id}", None, {}),
    "a forward": ("saved_not_found", "DELETE", "/saved/{id}", None, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_answered_as_its_example(server, name):
    code, method, path, body, fields = WRONG[name]
    operation = ask(server, "/openapi.json").json["paths"][path.partition("?")[0]][method.lower()]
    contents = [response.get("content", {}) for response in operation["responses"].values()]
    problems = [content["application/problem+json"] for content in contents if "application/problem+json" in content]
    examples = {each: example["value"] for one in problems for each, example in one["examples"].items()}
    address = path.replace("{id}", "none").replace("{format}", "svg")
    rest = {field: text for field, text in fields.items() if field != "content_type"}
    media = fields.get("content_type", JSON)
    answer = ask(server, address, method, **rest) if body is None else post(server, address, body, media, **rest)
    assert answer.json | {"request_id": ""} == examples[code] | {"request_id": ""}
    assert answer.status == examples[code]["status"]
