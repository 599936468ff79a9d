"""Describe in OpenAPI the plain ASGI routes, which FastAPI does not know: JSON, safetensors, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from flashpoint_contract import wire
from flashpoint_contract.caches import CACHE_OPTIONS, MOST_CACHES
from flashpoint_contract.options import FARTHEST_OFFSET, Direction
from flashpoint_contract.saved import SAVED_OPTIONS, TAKEN_BESIDE
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.benchmark import BenchmarkRequest
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.shapes import NUMBER_SCHEMA
from flashpoint_contract.schemas.verify import ProblemEvent, ReportEvent, VerifyProgress, VerifyReport, VerifyRequest
from flashpoint_contract.sse import MEDIA_TYPE as EVENT_STREAM
from flashpoint_contract.tensors import ANSWERS, BACKWARD_TENSORS, FORWARD_TENSORS, JUDGED, REQUIRED, TENSORS
from flashpoint_server.refusal import STATUS
from flashpoint_server.routes.schema import openapi_caches
from flashpoint_server.routes.schema import openapi_examples as examples
from flashpoint_server.routes.schema.problem_schema import ProblemDocument, problems, reference, text_headers

TAGS = {
    "attention": "Compute attention and its gradients.",
    "caches": "Hold KV caches and saved forwards on the server.",
    "verify and benchmark": "Check answers against float64, and time a grid of problems while other requests run.",
    "status": "Get health, versions, limits and metrics.",
    "Open Inference Protocol": "Make the same calls with `tritonclient` or KServe's clients.",
}  # descriptions of the tags, in their order in /docs
_HEADERS = {
    "X-Request-Id": "The request's id; if the request had none, the server made it.",
    "X-Backend": "The backend that ran.",
    "X-Kernel": "The CPU kernel in C that ran, such as `c-amx`; absent if another kernel ran.",
    "X-Batch-Size": "Number of requests in the same launch.",
    "Server-Timing": "Milliseconds of decode (includes the arrival of the body), queue, compute and encode.",
}
_FIELDS = {
    "X-Timeout-Ms": {
        "schema": {"type": "integer", "minimum": 1},
        "description": "Deadline in milliseconds from the arrival of the head; the server's longest one caps it.",
    },
    "X-Priority": {
        "schema": {"type": "integer", "minimum": 0, "maximum": 9, "default": 0},
        "description": "0 to 9, the most urgent; a step is worth a second of waiting.",
    },
    "X-Request-Id": {
        "schema": {"type": "string"},
        "description": "Id of the request in the answer and the log: up to 128 letters, digits and `._:/+=@~-`. "
        "The server replaces an id that is not valid.",
    },
}
_OCTETS = (wire.MEDIA_TYPE, "application/octet-stream")
_FILE = "A safetensors file: tensors by name, and each option in `__metadata__` as JSON."
_BINARY = {"schema": {"type": "string", "format": "binary", "description": _FILE}}
_SUMMARY = {"forward": "Compute attention", "backward": "Compute gradients of attention"}
_TEXT = {
    "forward": "Send q, k and v; the answer has o, lse with `return_lse`, and key_weights with `return_key_weights`: "
    "the sum over the queries of each key's probability; over caches (B,Hq,L), with zeros beyond a cache's length. "
    "JSON and safetensors are both accepted.",
    "backward": "Send the forward's inputs and `do`; the answer has the gradients that `grads` names. "
    "If you send `o` and `lse` of the forward, the server does not compute them again.",
}
_STORED = ("cache_", "saved_", "idempotency_")  # prefixes of the codes about caches and saved forwards
_ERRORS = [code for code in STATUS if code not in ("not_found", "method_not_allowed") and not code.startswith(_STORED)]
_STORED_ERRORS = {
    "forward": [code for code in STATUS if code.startswith(("cache_", "idempotency_"))],
    "backward": [*(code for code in STATUS if code.startswith("saved_")), "cache_elsewhere"],
}
_DETAILS = {
    "forward": {},
    "backward": {"invalid_request": "dout: unknown option or tensor; did you mean do?"},
    "verify": {
        "invalid_request": "shape.head_dim: is missing",
        "work_too_large": "the verification needs 236 TFLOP, over the limit of 275 GFLOP; lengths of up to 5585 fit",
    },
}  # details of error examples that replace those of DETAILS in one operation
MOST_DIMENSIONS = 4  # maximum number of dimensions of a tensor in JSON
_KEYS: list[dict[str, list[str]]] = [{}, {"bearer": []}]  # a key is needed only if the server has keys


def install(app: FastAPI, paths: dict[str, Direction], add: Callable[[dict[str, Any]], None]) -> None:
    """Make `app.openapi` also describe `paths`, /verify, /caches and /saved. `add` adds more paths to the document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        if "JsonTensor" not in schemas:
            _add_schemas(schemas)
            document["components"].setdefault("securitySchemes", {})["bearer"] = {"type": "http", "scheme": "bearer"}
            calls = {path: {"post": _operation(direction)} for path, direction in paths.items()}
            document["paths"] = calls | document["paths"]
            document["paths"]["/verify"] = {"post": _verification()}
            openapi_caches.add(document)
            add(document)
            document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
            for operation in (each for path in document["paths"].values() for each in path.values()):
                # FastAPI adds a 422 to each operation with a parameter. This service never sends it.
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
                if "401" in operation["responses"]:
                    operation["security"] = _KEYS
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents


def _nested(element: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return the schema of lists nested up to `depth`: many client generators refuse a schema that refers to itself."""
    return {"type": "array", "items": element if depth == 1 else {"anyOf": [element, _nested(element, depth - 1)]}}


def _add_schemas(schemas: dict[str, Any]) -> None:
    integer = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
    for kind, element in (("Tensor", NUMBER_SCHEMA), ("Booleans", {"type": "boolean"}), ("Integers", integer)):
        schemas[f"{kind}Rows"] = _nested(element, MOST_DIMENSIONS)
        schemas[f"Json{kind}"] = _json_tensor(element, reference(f"{kind}Rows"))
    options = AttentionOptions.model_json_schema()["properties"]
    dtype = {"enum": list(jsonwire.DTYPES), "default": "float32", "description": "Data type of q, k, v, do and o."}

    def request(names: tuple[str, ...], needed: list[str]) -> dict[str, Any]:
        carried = tuple(name for name in names if "json" not in TENSORS[name].refused)
        return _object({**_tensors(carried), "dtype": dtype, **options}, needed)

    schemas["AttentionRequest"] = _over_caches(request(FORWARD_TENSORS, [*REQUIRED["forward"]]))
    schemas["AttentionGradRequest"] = _over_saved(request(BACKWARD_TENSORS, [*REQUIRED["backward"]]))
    judged = tuple(name for name in JUDGED if name not in BACKWARD_TENSORS)
    schemas["VerifyTensors"] = request((*BACKWARD_TENSORS, *judged), [*REQUIRED["forward"]])
    events = (VerifyProgress, ReportEvent, ProblemEvent)
    models: tuple[type[BaseModel], ...] = (VerifyRequest, VerifyReport, *events, BenchmarkRequest, ProblemDocument)
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
        schemas.update(schema.pop("$defs", {}))
        schemas[schema["title"]] = schema

    def answer(names: tuple[str, ...], needed: list[str]) -> dict[str, Any]:
        text = "Data type of the tensors that have the inputs' data type."
        beside = {
            "dtype": {"enum": list(jsonwire.DTYPES), "description": text},
            "backend": {"type": "string", "description": "The backend that ran."},
            "kernel": {"type": "string", "description": "The CPU kernel in C, such as `c-amx`, if one ran."},
            "dropout_seed": {"type": "integer", "description": "The seed of the dropout, if dropout ran."},
        }
        return _object({**_tensors(names), **beside}, [*needed, "dtype", "backend"])

    schemas["AttentionAnswer"] = answer(ANSWERS["forward"], ["o"])
    lengths = {"type": "array", "items": {"type": "integer"}, "description": "Lengths of the caches in this layer."}
    saved = {"type": "string", "description": "The id of this forward, if it was saved."}
    schemas["AttentionAnswer"]["properties"] |= {"lengths": lengths, "saved": saved}
    schemas["AttentionGradAnswer"] = answer(ANSWERS["backward"], [])


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _over_caches(request: dict[str, Any]) -> dict[str, Any]:
    """Add `save` and the options of calls with caches to a request's schema; with caches, k and v are optional."""
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
    """Add the id of a saved forward to a request's schema; with it, most other fields are not allowed."""
    taken = {"saved", "dtype", *(name for names in TAKEN_BESIDE for name in names)}
    others = [{"required": [name]} for name in request["properties"] if name not in taken]
    whole = {"required": request.pop("required"), "properties": {"saved": {"type": "null"}}}
    alone = {"required": ["do", "saved"], "properties": {"saved": {"type": "string"}}, "not": {"anyOf": others}}
    request["properties"]["saved"] = {"type": ["string", "null"], "description": SAVED_OPTIONS["saved"].text}
    request["required"] = ["do"]
    return request | {"anyOf": [whole, alone]}


def _json_tensor(element: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    shape = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": wire.RANK_LIMIT}
    flat = {"shape": shape, "data": {"type": "array", "items": element}}
    return {
        "description": "Nested lists in row-major order, or a shape with flat data (needed for an empty tensor).",
        "anyOf": [rows, _object(flat, [*flat])],
    }


def _tensors(names: tuple[str, ...]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name in names:
        row = TENSORS[name]
        kinds = ["JsonIntegers"] if row.is_index else ["JsonTensor"]
        if row.dtypes == ("bool",):
            kinds = ["JsonBooleans"]
        elif "bool" in row.dtypes:
            kinds.append("JsonBooleans")
        references = [reference(kind) for kind in kinds]
        if row.may_be_number:
            references.insert(0, {"type": "integer", "minimum": -FARTHEST_OFFSET, "maximum": FARTHEST_OFFSET})
        one = references[0] if len(references) == 1 else {"anyOf": references}
        properties[name] = {**one, "description": row.text}
    return properties


def _verification() -> dict[str, Any]:
    """Return the operation of /verify: two kinds of request, one report."""
    ours = _operation("forward", stored=False)
    # /verify answers in JSON, or with events if Accept names them, so it never sends not_acceptable
    errors = problems(*(c for c in _ERRORS if c != "not_acceptable"), **_DETAILS["verify"])
    kinds = {"oneOf": [reference("VerifyRequest"), reference("VerifyTensors")]}
    ours["requestBody"]["content"][jsonwire.MEDIA_TYPE] = {"schema": kinds, "examples": examples.VERIFY}
    text = "If Accept contains this type: `VerifyProgress` events, then a `ReportEvent` or a `ProblemEvent`."
    stream = {"schema": {"type": "string", "description": text}}
    answers = {jsonwire.MEDIA_TYPE: {"schema": reference("VerifyReport")}, EVENT_STREAM: stream}
    return ours | {
        "tags": ["verify and benchmark"],
        "summary": "Check a backend, or your own answers, against float64",
        "description": "Send the sizes of a problem, and the server draws it from a seed. Or send tensors as to "
        "/attention: if o, lse or gradients are among them, the server checks these instead of a backend's answers.",
        "operationId": "verify",
        "responses": {"200": {"description": "The errors of each tensor.", "content": answers}, **errors},
    }


def _operation(direction: Direction, *, stored: bool = True) -> dict[str, Any]:
    forward = direction == "forward"
    name, shown = ("Attention", examples.FORWARD) if forward else ("AttentionGrad", examples.BACKWARD)
    content = {jsonwire.MEDIA_TYPE: {"schema": reference(f"{name}Request"), "examples": shown}}
    answered = {jsonwire.MEDIA_TYPE: {"schema": reference(f"{name}Answer")}}
    binary = dict.fromkeys(_OCTETS, _BINARY)
    cached = stored and forward
    codes = [*_ERRORS, *(_STORED_ERRORS[direction] if stored else ())]
    return {
        "tags": ["attention"],
        "summary": _SUMMARY[direction],
        "description": _TEXT[direction],
        "operationId": "attention" if forward else "attention_grad",
        "parameters": [
            *({"name": name, "in": "header", "required": False, **field} for name, field in _FIELDS.items()),
            *([openapi_caches.REPLICA, openapi_caches.KEY] if cached else []),
        ],
        "requestBody": {"required": True, "content": content | binary},
        "responses": {
            "200": {
                "description": "The answer, in the format of Accept, or in the request's format without Accept.",
                "headers": text_headers(_HEADERS) | (openapi_caches.TOLD if cached else {}),
                "content": answered | binary,
            },
            **problems(*codes, **_DETAILS[direction]),
        },
    }
