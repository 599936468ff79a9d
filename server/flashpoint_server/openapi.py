"""The two calls in OpenAPI: both encodings, every option, the errors, and an example that can be pasted."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from flashpoint import jsonwire, wire
from flashpoint._proof import ANSWERS
from flashpoint.benchmark_schema import BenchmarkRequest
from flashpoint.options import AttentionOptions
from flashpoint.verify_schema import VerifyReport, VerifyRequest
from flashpoint_kernels.spec import BACKWARD_TENSORS, FORWARD_TENSORS, GRADS, Direction
from flashpoint_server.refusal import MEDIA_TYPE, STATUS

_TENSORS = {
    "q": "(B,Hq,Sq,D) in layout bhsd, (B,Sq,Hq,D) in bshd, (Tq,Hq,D) in thd; also (B,S,D) and (S,D), as one head",
    "k": "(B,Hk,Sk,D), likewise",
    "v": "(B,Hk,Sk,Dv), likewise",
    "attn_mask": "booleans (true: attend) or numbers (added to the scaled scores), broadcastable to (B,Hq,Sq,Sk)",
    "alibi_slopes": "(Hq,) or (B,Hq)",
    "sinks": "(Hq,): one more logit a head in the softmax's denominator",
    "q_lengths": "(B,): valid queries of padded sequences",
    "kv_lengths": "(B,): valid keys of padded sequences",
    "cu_seqlens_q": "(n+1,): where sequences begin in Tq, in layout thd",
    "cu_seqlens_k": "(n+1,): where sequences begin in Tk, in layout thd",
    "do": "the gradient of o, of o's shape",
    "dlse": "the gradient of lse, of its shape",
    "o": "the forward's answer; with it and lse the forward is not run again",
    "lse": "(B,Hq,Sq), in layout thd (Hq,Tq)",
    "dq": "of q's shape",
    "dk": "of k's shape",
    "dv": "of v's shape",
    "dattn_mask": "of attn_mask's own shape",
    "dsinks": "(Hq,)",
}
_HEADERS = {
    "X-Request-Id": "echoed, or made",
    "X-Backend": "the backend that ran",
    "X-Batch-Size": "requests that ran in the same launch",
    "Server-Timing": "decode, queue, compute and encode in milliseconds",
}
_EXAMPLE = {
    "q": [[1.0, 0.0], [0.0, 1.0]],
    "k": [[1.0, 0.0], [0.0, 1.0]],
    "v": [[1.0, 2.0], [3.0, 4.0]],
    "causal": True,
}
_SUMMARY = {"forward": "Attention", "backward": "Gradients of attention"}


def install(app: FastAPI, paths: dict[str, Direction]) -> None:
    """Make `app.openapi` describe `paths` too, which are plain ASGI and so unknown to FastAPI.

    The schema of `Problem` is there already: other routes name it.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        if "JsonTensor" not in schemas:
            _add_schemas(schemas)
            document["components"].setdefault("securitySchemes", {})["bearer"] = {"type": "http", "scheme": "bearer"}
            for path, direction in paths.items():
                document["paths"][path] = {"post": _operation(direction)}
            document["paths"]["/verify"] = {"post": _verification()}
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _add_schemas(schemas: dict[str, Any]) -> None:
    number = {"oneOf": [{"type": "number"}, {"type": "boolean"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    schemas["JsonTensor"] = {
        "description": "Nested lists, row-major, or the flat form, which empty tensors need.",
        "oneOf": [
            {"type": "array", "items": {}},
            {
                "type": "object",
                "properties": {
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "data": {"type": "array", "items": number},
                },
                "required": ["shape", "data"],
                "additionalProperties": False,
            },
        ],
    }
    options = AttentionOptions.model_json_schema()["properties"]
    dtype = {"enum": list(jsonwire.DTYPES), "default": "float32", "description": "of q, k, v, do and o"}
    for name, known, needed in (
        ("AttentionRequest", FORWARD_TENSORS, ["q", "k", "v"]),
        ("AttentionGradRequest", BACKWARD_TENSORS, ["q", "k", "v", "do"]),
    ):
        properties = {**_tensors(known), "dtype": dtype, **options}
        schemas[name] = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
    judged = {name: text for name, text in _tensors(ANSWERS).items() if name not in BACKWARD_TENSORS}
    schemas["VerifyTensors"] = {
        "type": "object",
        "properties": {**_tensors(BACKWARD_TENSORS), **judged, "dtype": dtype, **options},
        "required": ["q", "k", "v"],
        "additionalProperties": False,
    }
    for model in (VerifyRequest, VerifyReport, BenchmarkRequest):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    said = {
        "dtype": {"type": "string"},
        "backend": {"type": "string", "description": "the backend that ran"},
        "dropout_seed": {"type": "integer", "description": "where dropout ran"},
    }
    schemas["AttentionAnswer"] = {
        "type": "object",
        "properties": {**_tensors(("o", "lse")), **said},
        "required": ["o", "dtype", "backend"],
    }
    schemas["AttentionGradAnswer"] = {
        "type": "object",
        "properties": {**_tensors(GRADS), **said},
        "required": ["dtype", "backend"],
    }


def _verification() -> dict[str, Any]:
    """The operation of /verify: two kinds of request, one report."""
    ours = _operation("forward")
    drawn = {"$ref": "#/components/schemas/VerifyRequest"}
    given = {"$ref": "#/components/schemas/VerifyTensors"}
    content = ours["requestBody"]["content"]
    content[jsonwire.MEDIA_TYPE] = {
        "schema": {"oneOf": [drawn, given]},
        "example": {"shape": {"q_len": 64, "head_dim": 32}},
    }
    report = {"schema": {"$ref": "#/components/schemas/VerifyReport"}}
    ours["responses"]["200"] = {"description": "The errors of every tensor", "content": {jsonwire.MEDIA_TYPE: report}}
    return ours | {
        "tags": ["proof"],
        "summary": "How far a backend, or what the caller computed, is from float64",
        "operationId": "verify",
    }


def _tensors(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: {"$ref": "#/components/schemas/JsonTensor", "description": _TENSORS[name]} for name in names}


def _operation(direction: Direction) -> dict[str, Any]:
    name = "Attention" if direction == "forward" else "AttentionGrad"
    example = _EXAMPLE if direction == "forward" else {**_EXAMPLE, "do": [[1.0, 1.0], [1.0, 1.0]]}
    binary = {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "a safetensors file: the tensors by name, each option in `__metadata__` as JSON",
        }
    }
    errors: dict[int, list[str]] = {}
    for code, status in STATUS.items():
        if code not in ("not_found", "method_not_allowed"):
            errors.setdefault(status, []).append(code)
    return {
        "tags": ["attention"],
        "summary": _SUMMARY[direction],
        "operationId": "attention" if direction == "forward" else "attention_grad",
        "security": [{}, {"bearer": []}],
        "parameters": [
            _header("X-Timeout-Ms", {"type": "integer", "minimum": 1}, "deadline, in milliseconds"),
            _header("X-Priority", {"type": "integer", "minimum": 0, "maximum": 9, "default": 0}, "higher runs sooner"),
            _header("X-Request-Id", {"type": "string", "maxLength": 128}, "echoed, and found in the log"),
        ],
        "requestBody": {
            "required": True,
            "content": {
                jsonwire.MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{name}Request"}, "example": example},
                wire.MEDIA_TYPE: binary,
                "application/octet-stream": binary,
            },
        },
        "responses": {
            "200": {
                "description": "The answer, in the encoding that Accept asks for, else in the request's",
                "headers": {h: {"schema": {"type": "string"}, "description": text} for h, text in _HEADERS.items()},
                "content": {
                    jsonwire.MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{name}Answer"}},
                    wire.MEDIA_TYPE: binary,
                },
            },
            **{
                str(status): {
                    "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}",
                    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
                }
                for status, codes in sorted(errors.items())
            },
        },
    }


def _header(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
