"""What /openapi.json says of the two calls is what they do."""

import json

import pytest

from flashpoint.options import AttentionOptions
from flashpoint_kernels.spec import BACKWARD_TENSORS, FORWARD_TENSORS
from flashpoint_server import Settings, create_app
from flashpoint_server.app import PATHS
from flashpoint_server.refusal import STATUS


@pytest.fixture(scope="module")
def document():
    app = create_app(Settings(device="cpu"))
    document = app.openapi()
    assert app.openapi() == document  # made once
    return json.loads(json.dumps(document))


def test_every_route_is_there(document):
    assert set(document["paths"]) == {
        *PATHS, "/verify", "/info", "/metrics", "/health/live", "/health/ready", "/benchmark", "/benchmark/{id}",
        "/benchmark/{id}/events", "/benchmark/{id}/plot.{format}",
    }  # fmt: skip


@pytest.mark.parametrize(("path", "tensors"), [("/attention", FORWARD_TENSORS), ("/attention/grad", BACKWARD_TENSORS)])
def test_a_call_names_every_tensor_option_and_error(document, path, tensors):
    operation = document["paths"][path]["post"]
    content = operation["requestBody"]["content"]
    assert set(content) == {"application/json", "application/vnd.safetensors", "application/octet-stream"}
    schema = document["components"]["schemas"][content["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    assert set(schema["properties"]) == {"dtype", *tensors, *AttentionOptions.model_fields}
    for example in content["application/json"]["examples"].values():
        assert set(schema["required"]) <= set(example["value"]) <= set(schema["properties"])
    statuses = {str(status) for code, status in STATUS.items() if code not in ("not_found", "method_not_allowed")}
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

    found = set(references(document))
    assert "#/components/schemas/Problem" in found
    for reference in found:
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_every_error_of_every_route_is_a_problem(document):
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    errors = [(s, r) for operation in operations for s, r in operation["responses"].items() if s >= "400"]
    assert {int(status) for status, _ in errors} == set(STATUS.values()) - {405}  # an operation has its method
    for status, response in errors:
        assert set(response["content"]) == {"application/problem+json"}
        assert all(code in response["description"] for code, s in STATUS.items() if s == int(status))
    assert all("security" in operation for operation in operations if "401" in operation["responses"])
