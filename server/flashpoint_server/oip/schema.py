"""Describe inference in OpenAPI: the JSON format by a schema, and the binary format, which has none, by a text."""

from __future__ import annotations

from typing import Any

from flashpoint_contract import wire
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_server.formats.safetensors import OCTETS
from flashpoint_server.oip.datatypes import DATATYPE_OF
from flashpoint_server.oip.head import PRIORITY_LEVELS, SIDES
from flashpoint_server.oip.models import MODELS, Model, datatypes
from flashpoint_server.refusal import MEDIA_TYPE, STATUS
from flashpoint_server.routes.schema.problem_schema import problems

TAG = "Open Inference Protocol"
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_UNUSED = ("not_found", "method_not_allowed", "not_acceptable")
_CODES = [code for code in STATUS if code not in _UNUSED and not code.startswith(("cache_", "saved_"))]
_DESCRIPTION = """
With the protocol's binary extension, an input has the parameter `binary_data_size` instead of `data`. The bytes of the
tensors follow the JSON, in the order of the inputs, and `Inference-Header-Content-Length` is the length of the JSON.
The parameter `binary_data` of an output, or `binary_data_output` for all of them, asks for a binary answer.
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


def errors(*codes: str, **details: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a path under /v2 for these error codes, by status.

    `details` replace the example texts of some codes.
    """
    return {
        status: {**response, "content": {jsonwire.MEDIA_TYPE: _plain(response["content"][MEDIA_TYPE]["examples"])}}
        for status, response in problems(*codes, **details).items()
    }


def _plain(examples: dict[str, Any]) -> dict[str, Any]:
    errors = {code: one | {"value": {"error": one["value"]["detail"]}} for code, one in examples.items()}
    return {"schema": {"$ref": "#/components/schemas/ProtocolError"}, "examples": errors}


def add(document: dict[str, Any]) -> None:
    """Add the operations of inference to an OpenAPI document, and the schemas to which they refer."""
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
    content = {
        "schema": {"$ref": f"#/components/schemas/Infer_{model.name}"},
        "examples": {"causal": {"summary": "Two positions, causal", "value": example}},
    }
    return {
        "tags": [TAG],
        "summary": f"Infer with {model.name}",
        "description": _DESCRIPTION,
        "operationId": f"infer_{model.name}",
        "requestBody": {"required": True, "content": {jsonwire.MEDIA_TYPE: content}},
        "responses": {
            "200": {
                "description": "The outputs.",
                "content": {
                    jsonwire.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/InferAnswer"}},
                    OCTETS: {"schema": {"type": "string", "format": "binary"}},
                },
            },
            **{str(status): response for status, response in errors(*_CODES).items()},
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
    for name in nullable:  # a parameter cannot be null in this protocol: callers omit it instead
        (given,) = (kind for kind in options[name]["anyOf"] if kind != {"type": "null"})
        options[name] = given | {"description": options[name]["description"]}
    return {
        **options,
        "grads": {"type": "string", "description": "Names, separated by commas.", "enum": ["dq,dk,dv", "dv"]},
        **sides,
        "binary_data_output": {"type": "boolean"},
        "timeout": {
            "type": "integer",
            "minimum": 0,
            "maximum": (1 << 63) - 1,
            "description": "Timeout in microseconds; 0 means none.",
        },
        "priority": {
            "type": "integer",
            "minimum": 0,
            "maximum": PRIORITY_LEVELS,
            "description": "1 is the highest priority, 10 the lowest; 0 means 10.",
        },
    }


def _answer() -> dict[str, Any]:
    output = {
        "name": {"type": "string"},
        "datatype": {"enum": list(DATATYPE_OF.values())},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"$ref": "#/components/schemas/TensorRows"},
        "parameters": {
            "type": "object",
            "description": "Without `data`: the location of the tensor, after this JSON or in shared memory.",
        },
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
