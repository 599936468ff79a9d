"""/openapi.json describes every route, tensor, option and error."""

import json

import pytest

from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.tensors import BACKWARD_TENSORS, FORWARD_TENSORS, TENSORS
from flashpoint_server import Settings, create_app
from flashpoint_server.app import PATHS
from flashpoint_server.refusal import STATUS
from flashpoint_server.routes.schema.problem_schema import ProblemDocument


@pytest.fixture(scope="module")
def document():
    app = create_app(Settings(device="cpu"))
    document = app.openapi()
    assert app.openapi() == document  # the second call returns the same document
    return json.loads(json.dumps(document))


def test_every_route_is_there(document):
    assert set(document["paths"]) == {
        *PATHS, "/verify", "/info", "/metrics", "/health", "/health/live", "/health/ready",
        "/benchmark", "/benchmark/{id}", "/benchmark/{id}/events", "/benchmark/{id}/plot.{format}",
        "/caches", "/caches/fork", "/caches/delete", "/caches/{id}",
        *(f"/caches/{{id}}/{what}" for what in ("append", "truncate", "renew", "tensors")),
        "/saved", "/saved/{id}",
        "/v2", "/v2/health/live", "/v2/health/ready", "/v2/repository/index", "/v2/models/stats", "/v2/models/{name}",
        *(f"/v2/models/{{name}}/{what}" for what in ("ready", "config", "stats")),
        *(f"/v2/models/{name}/infer" for name in ("attention", "attention_grad")),
    }  # fmt: skip


@pytest.mark.parametrize(("path", "tensors"), [("/attention", FORWARD_TENSORS), ("/attention/grad", BACKWARD_TENSORS)])
def test_a_call_names_every_tensor_option_and_error(document, path, tensors):
    operation = document["paths"][path]["post"]
    content = operation["requestBody"]["content"]
    assert set(content) == {"application/json", "application/vnd.safetensors", "application/octet-stream"}
    schema = document["components"]["schemas"][content["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    forward = path == "/attention"
    of_held = [*CACHE_OPTIONS, "save"] if forward else ["saved"]
    carried = {name for name in tensors if "json" not in TENSORS[name].refused}
    assert set(schema["properties"]) == {"dtype", *carried, *AttentionOptions.model_fields, *of_held}
    for example in content["application/json"]["examples"].values():
        assert set(schema["required"]) <= set(example["value"]) <= set(schema["properties"])
    unused = ("not_found", "method_not_allowed")
    others = "saved_" if forward else "cache_"
    codes = [code for code in STATUS if code not in unused and not code.startswith(others)]
    statuses = {str(STATUS[code]) for code in codes}
    assert set(operation["responses"]) == {"200", *statuses}
    for status in statuses:
        assert set(operation["responses"][status]["content"]) == {"application/problem+json"}


def test_every_reference_leads_somewhere(document):
    def references(node):
        if isinstance(node, dict):
            yield from [node["$ref"]] if "$ref" in node else []
            for child in node.values():
                yield from references(child)
        elif isinstance(node, list):
            for child in node:
                yield from references(child)

    names = set(references(document))
    assert "#/components/schemas/Problem" in names
    for reference in names:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_error_of_every_route_has_an_example_of_each_code(document):
    operations = [(path, operation) for path, item in document["paths"].items() for operation in item.values()]
    errors = [(p, int(s), r) for p, operation in operations for s, r in operation["responses"].items() if s >= "400"]
    shown = set()
    for path, status, response in errors:
        ((media, content),) = response["content"].items()
        assert media == ("application/json" if path.startswith("/v2") else "application/problem+json")
        phrase, codes = response["description"].split(": ")
        assert codes.split(", ") == [*content["examples"]]
        for code, example in content["examples"].items():
            assert STATUS[code] == status
            value = example["value"]
            if path.startswith("/v2"):
                assert value.keys() == {"error"}
            else:
                ProblemDocument.model_validate(value)
                assert (value["status"], value["title"], value["code"]) == (status, phrase, code)
            shown.add(code)
    assert shown == STATUS.keys() - {"method_not_allowed"}  # a documented method never gets 405
    assert all("security" in operation for _, operation in operations if "401" in operation["responses"])


def test_attention_comes_first(document):
    assert list(document["paths"])[:2] == list(PATHS)
    named = [tag["name"] for tag in document["tags"]]
    used = {tag for item in document["paths"].values() for operation in item.values() for tag in operation["tags"]}
    assert named[0] == "attention"
    assert used == set(named)
