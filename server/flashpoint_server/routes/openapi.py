"""What FastAPI cannot see of the service: the calls that are plain ASGI, in both encodings, with their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from flashpoint import jsonwire
from flashpoint._http.sse import MEDIA_TYPE as EVENT_STREAM
from flashpoint.benchmark_schema import BenchmarkRequest
from flashpoint.options import AttentionOptions
from flashpoint.verify_schema import ProblemEvent, ReportEvent, VerifyProgress, VerifyReport, VerifyRequest
from flashpoint_contract import wire
from flashpoint_contract.caches import CACHE_OPTIONS, MOST_CACHES
from flashpoint_contract.options import Direction
from flashpoint_contract.saved import SAVED_OPTIONS, TAKEN_BESIDE
from flashpoint_contract.tensors import ALL_ANSWERS, ANSWERS, BACKWARD_TENSORS, FORWARD_TENSORS, REQUIRED, TENSORS
from flashpoint_server.refusal import STATUS
from flashpoint_server.routes import openapi_caches
from flashpoint_server.routes import openapi_examples as examples
from flashpoint_server.routes.problem_schema import ProblemDocument, problems

_HEADERS = {
    "X-Request-Id": "echoed, or made",
    "X-Backend": "the backend that ran",
    "X-Batch-Size": "requests that ran in the same launch",
    "Server-Timing": "decode, queue, compute and encode in milliseconds",
}
_SUMMARY = {"forward": "Attention", "backward": "Gradients of attention"}
_NO_CALL = ("not_found", "method_not_allowed")
_OF_HELD = {"forward": "cache_", "backward": "saved_"}  # how codes begin that a call over what is held may have
_ERRORS = sorted(
    {
        status
        for code, status in STATUS.items()
        if code not in _NO_CALL and not code.startswith(tuple(_OF_HELD.values()))
    }
)
_HELD_ERRORS = {
    direction: sorted({status for code, status in STATUS.items() if code.startswith(word)})
    for direction, word in _OF_HELD.items()
}
_KEYS: list[dict[str, list[str]]] = [{}, {"bearer": []}]  # a key where the server has keys


def install(app: FastAPI, paths: dict[str, Direction], add: Callable[[dict[str, Any]], None]) -> None:
    """Make `app.openapi` describe `paths`, /verify and what `add` adds to the document."""
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
            openapi_caches.add(document)
            add(document)
            for operation in (each for path in document["paths"].values() for each in path.values()):
                if "401" in operation["responses"]:
                    operation["security"] = _KEYS
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _add_schemas(schemas: dict[str, Any]) -> None:
    number = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    integer = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
    for kind, element in (("Tensor", number), ("Booleans", {"type": "boolean"}), ("Integers", integer)):
        rows = {"$ref": f"#/components/schemas/{kind}Rows"}
        schemas[f"{kind}Rows"] = {"type": "array", "items": {"anyOf": [element, rows]}}
        schemas[f"Json{kind}"] = _json_tensor(element, rows)
    options = AttentionOptions.model_json_schema()["properties"]
    dtype = {"enum": list(jsonwire.DTYPES), "default": "float32", "description": "of q, k, v, do and o"}

    def request(names: tuple[str, ...], needed: list[str]) -> dict[str, Any]:
        carried = tuple(name for name in names if "json" not in TENSORS[name].refused)
        properties = {**_tensors(carried), "dtype": dtype, **options}
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}

    schemas["AttentionRequest"] = _over_caches(request(FORWARD_TENSORS, [*REQUIRED["forward"]]))
    schemas["AttentionGradRequest"] = _over_saved(request(BACKWARD_TENSORS, [*REQUIRED["backward"]]))
    judged = tuple(name for name in ALL_ANSWERS if name not in BACKWARD_TENSORS)
    schemas["VerifyTensors"] = request((*BACKWARD_TENSORS, *judged), [*REQUIRED["forward"]])
    events = (VerifyProgress, ReportEvent, ProblemEvent)
    models: tuple[type[BaseModel], ...] = (VerifyRequest, VerifyReport, *events, BenchmarkRequest, ProblemDocument)
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
        schemas.update(schema.pop("$defs", {}))
        schemas[schema["title"]] = schema

    def answer(names: tuple[str, ...], needed: list[str]) -> dict[str, Any]:
        said = {
            "dtype": {"enum": list(jsonwire.DTYPES), "description": "of the tensors that have their input's"},
            "backend": {"type": "string", "description": "the backend that ran"},
            "dropout_seed": {"type": "integer", "description": "where dropout ran"},
        }
        properties = {**_tensors(names), **said}
        needed = [*needed, "dtype", "backend"]
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}

    schemas["AttentionAnswer"] = answer(ANSWERS["forward"], ["o"])
    lengths = {"type": "array", "items": {"type": "integer"}, "description": "of the caches, in that layer"}
    saved = {"type": "string", "description": "the id of this forward, where it was saved"}
    schemas["AttentionAnswer"]["properties"] |= {"lengths": lengths, "saved": saved}
    schemas["AttentionGradAnswer"] = answer(ANSWERS["backward"], [])


def _over_caches(request: dict[str, Any]) -> dict[str, Any]:
    """Add the options of caches to the schema of a request, which then need not have k and v."""
    of: dict[str, Any] = {name: {"description": row.text} for name, row in CACHE_OPTIONS.items()}
    of["caches"] |= {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_CACHES}
    of["layer"] |= {"type": "integer", "minimum": 0, "default": 0}
    of["at"] |= {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}}
    whole = {"required": request.pop("required"), "not": {"anyOf": [{"required": [name]} for name in CACHE_OPTIONS]}}
    save = {"type": "boolean", "default": False, "description": SAVED_OPTIONS["save"].text}
    request["properties"] |= of | {"save": save}
    request["required"] = ["q"]
    return request | {"anyOf": [whole, {"required": ["q", "caches"], "properties": {"save": {"enum": [False]}}}]}


def _over_saved(request: dict[str, Any]) -> dict[str, Any]:
    """Add the id of a saved forward to the schema of a request, which then has little else."""
    taken = {"saved", "dtype", *(name for names in TAKEN_BESIDE for name in names)}
    others = [{"required": [name]} for name in request["properties"] if name not in taken]
    whole = {"required": request.pop("required"), "properties": {"saved": {"type": "null"}}}
    alone = {"required": ["do", "saved"], "properties": {"saved": {"type": "string"}}, "not": {"anyOf": others}}
    request["properties"]["saved"] = {"type": ["string", "null"], "description": SAVED_OPTIONS["saved"].text}
    request["required"] = ["do"]
    return request | {"anyOf": [whole, alone]}


def _json_tensor(element: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    size = {"type": "integer", "minimum": 0}
    flat = {
        "shape": {"type": "array", "items": size, "maxItems": wire.RANK_LIMIT},
        "data": {"type": "array", "items": element},
    }
    return {
        "description": "Nested lists, row-major, or the flat form, which empty tensors need.",
        "anyOf": [rows, {"type": "object", "properties": flat, "required": [*flat], "additionalProperties": False}],
    }


def _tensors(names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        row = TENSORS[name]
        kinds = ["JsonIntegers"] if row.is_index else ["JsonTensor"]
        if row.dtypes == ("bool",):
            kinds = ["JsonBooleans"]
        elif "bool" in row.dtypes:
            kinds.append("JsonBooleans")
        references = [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds]
        one: dict[str, Any] = references[0] if len(references) == 1 else {"anyOf": references}
        found[name] = {**one, "description": row.text}
    return found


def _verification() -> dict[str, Any]:
    """The operation of /verify: two kinds of request, one report."""
    ours = _operation("forward", held=False)
    kinds = [{"$ref": f"#/components/schemas/{name}"} for name in ("VerifyRequest", "VerifyTensors")]
    content = ours["requestBody"]["content"]
    content[jsonwire.MEDIA_TYPE] = {"schema": {"oneOf": kinds}, "examples": examples.VERIFY}
    report = {"schema": {"$ref": "#/components/schemas/VerifyReport"}}
    told = "Where Accept names it: `VerifyProgress` events while it runs, then a `ReportEvent` or a `ProblemEvent`"
    stream = {"schema": {"type": "string", "description": told}}
    answers = {jsonwire.MEDIA_TYPE: report, EVENT_STREAM: stream}
    del ours["responses"]["406"]  # its answer is JSON, whatever Accept says
    ours["responses"]["200"] = {"description": "The errors of every tensor", "content": answers}
    return ours | {
        "tags": ["proof"],
        "summary": "How far a backend, or what the caller computed, is from float64",
        "operationId": "verify",
    }


def _operation(direction: Direction, *, held: bool = True) -> dict[str, Any]:
    name = "Attention" if direction == "forward" else "AttentionGrad"
    binary = {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "a safetensors file: the tensors by name, each option in `__metadata__` as JSON",
        }
    }
    asked = {
        "schema": {"$ref": f"#/components/schemas/{name}Request"},
        "examples": examples.FORWARD if direction == "forward" else examples.BACKWARD,
    }
    answered = {"schema": {"$ref": f"#/components/schemas/{name}Answer"}}
    told = {h: {"schema": {"type": "string"}, "description": text} for h, text in _HEADERS.items()}
    cached = held and direction == "forward"
    statuses = sorted({*_ERRORS, *(_HELD_ERRORS[direction] if held else ())})
    return {
        "tags": ["attention"],
        "summary": _SUMMARY[direction],
        "operationId": "attention" if direction == "forward" else "attention_grad",
        "parameters": [
            _header("X-Timeout-Ms", {"type": "integer", "minimum": 1}, "deadline, in milliseconds"),
            _header("X-Priority", {"type": "integer", "minimum": 0, "maximum": 9, "default": 0}, "higher runs sooner"),
            _header(
                "X-Request-Id",
                {"type": "string"},
                "echoed, and found in the log: up to 128 letters, digits and `._:/+=@~-`; anything else is replaced",
            ),
            *([openapi_caches.REPLICA] if cached else []),
        ],
        "requestBody": {
            "required": True,
            "content": {jsonwire.MEDIA_TYPE: asked, wire.MEDIA_TYPE: binary, "application/octet-stream": binary},
        },
        "responses": {
            "200": {
                "description": "The answer, in the encoding that Accept asks for, else in the request's",
                "headers": told | (openapi_caches.TOLD if cached else {}),
                "content": {
                    jsonwire.MEDIA_TYPE: answered,
                    wire.MEDIA_TYPE: binary,
                    "application/octet-stream": binary,
                },
            },
            **{str(status): response for status, response in problems(*statuses).items()},
        },
    }


def _header(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
