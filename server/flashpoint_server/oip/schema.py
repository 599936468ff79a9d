"""Inference in OpenAPI, as JSON alone says it; the binary extension in words, for OpenAPI has no way to say it."""

from __future__ import annotations

from typing import Any

from flashpoint import jsonwire
from flashpoint.options import AttentionOptions
from flashpoint_contract import wire
from flashpoint_server.formats.safetensors import OCTETS
from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.head import PRIORITY_LEVELS, SIDES
from flashpoint_server.oip.models import MODELS, Model, datatypes
from flashpoint_server.refusal import STATUS
from flashpoint_server.routes.problem_schema import problems

TAG = "Open Inference Protocol"
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_UNUSED = ("not_found", "method_not_allowed", "not_acceptable")
_DESCRIPTION = """
With the protocol's binary extension the JSON names a `binary_data_size` among an input's parameters instead of `data`,
the tensors' bytes follow the JSON in the order of the inputs, and `Inference-Header-Content-Length` says how long the
JSON is. `binary_data` among an output's parameters, or `binary_data_output` for all, asks for an answer of that kind.
"""
_EXAMPLE: dict[str, Any] = {
    "inputs": [
        {"name": "q", "shape": [2, 2], "datatype": "FP32", "data": [1, 0, 0, 1]},
        {"name": "k", "shape": [2, 2], "datatype": "FP32", "data": [1, 0, 0, 1]},
        {"name": "v", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4]]},
    ],
    "parameters": {"causal": True},
}
_DO = {"name": "do", "shape": [2, 2], "datatype": "FP32", "data": [1, 1, 1, 1]}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses that are errors, as /v2 writes them."""
    content = {jsonwire.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProtocolError"}}}
    return {status: {**response, "content": content} for status, response in problems(*statuses).items()}


def add(document: dict[str, Any]) -> None:
    """Add the operations of inference, and what the routes refer to."""
    schemas = document["components"]["schemas"]
    schemas["ProtocolError"] = _ERROR
    schemas["InferAnswer"] = _answer()
    for model in MODELS.values():
        schemas[f"Infer_{model.name}"] = _request(model)
        document["paths"][f"/v2/models/{model.name}/infer"] = {"post": _operation(model)}


def _operation(model: Model) -> dict[str, Any]:
    example = _EXAMPLE
    if model.direction == "backward":
        example = {**_EXAMPLE, "inputs": [*_EXAMPLE["inputs"], _DO]}
    asked = {
        "schema": {"$ref": f"#/components/schemas/Infer_{model.name}"},
        "examples": {"causal": {"summary": "two positions, causal", "value": example}},
    }
    used = (code for code in STATUS if code not in _UNUSED and not code.startswith(("cache_", "saved_")))
    statuses = sorted({STATUS[code] for code in used})
    return {
        "tags": [TAG],
        "summary": f"Inference by {model.name}",
        "description": _DESCRIPTION,
        "operationId": f"infer_{model.name}",
        "requestBody": {"required": True, "content": {jsonwire.MEDIA_TYPE: asked}},
        "responses": {
            "200": {
                "description": "The outputs",
                "content": {
                    jsonwire.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/InferAnswer"}},
                    OCTETS: {"schema": {"type": "string", "format": "binary"}},
                },
            },
            **{str(status): response for status, response in errors(*statuses).items()},
        },
    }


def _request(model: Model) -> dict[str, Any]:
    size = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
    kinds = sorted({datatype for name in model.inputs for datatype in datatypes(name)})
    tensor = {
        "name": {"enum": list(model.inputs)},
        "shape": {"type": "array", "items": size, "maxItems": wire.RANK_LIMIT},
        "datatype": {"enum": kinds},
        "data": {"anyOf": [{"$ref": f"#/components/schemas/{rows}Rows"} for rows in ("Tensor", "Booleans")]},
        "parameters": {"type": "object", "maxProperties": 0},
    }
    output = {
        "name": {"enum": list(model.outputs)},
        "parameters": _object({"binary_data": {"type": "boolean"}}),
    }
    return _object(
        {
            **{name: {"type": "string"} for name in ("id", "model_name", "model_version")},
            "parameters": _object(_parameters()),
            "inputs": _list(_object(tensor, "name", "shape", "datatype", "data")),
            "outputs": _list(_object(output, "name")),
        },
        "inputs",
    )


def _parameters() -> dict[str, Any]:
    options = AttentionOptions.model_json_schema()["properties"]
    sides: dict[str, Any] = {}
    for name, names in SIDES.items():
        sides |= zip(names, options.pop(name)["prefixItems"], strict=True)
    nullable = [name for name, option in options.items() if {"type": "null"} in option.get("anyOf", [])]
    for name in nullable:  # a parameter is left out instead
        (given,) = (kind for kind in options[name]["anyOf"] if kind != {"type": "null"})
        options[name] = given | {"description": options[name]["description"]}
    return {
        **options,
        "grads": {"type": "string", "description": "names with commas between them", "enum": ["dq,dk,dv", "dv"]},
        **sides,
        "binary_data_output": {"type": "boolean"},
        "timeout": {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1, "description": "microseconds; 0: none"},
        "priority": {"type": "integer", "minimum": 0, "maximum": PRIORITY_LEVELS, "description": "1: first; 0: last"},
    }


def _answer() -> dict[str, Any]:
    output = {
        "name": {"type": "string"},
        "datatype": {"enum": list(DATATYPE_OF.values())},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"$ref": "#/components/schemas/TensorRows"},
        "parameters": {"type": "object", "description": "where it is instead: behind this JSON, or in shared memory"},
    }
    return _object(
        {
            **{name: {"type": "string"} for name in ("id", "model_name", "model_version")},
            "parameters": {"type": "object"},
            "outputs": _list(_object(output, "name", "datatype", "shape")),
        },
        "model_name",
        "model_version",
        "parameters",
        "outputs",
    )


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": wire.TENSOR_LIMIT}
