"""OpenAPI of /caches and /saved."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from flashpoint import jsonwire
from flashpoint_contract import wire
from flashpoint_contract.options import LAYOUTS
from flashpoint_server.routes.cache_schema import (
    CacheDescription,
    CacheLength,
    CacheList,
    CacheRequest,
    DeleteRequest,
    ForkRequest,
    TruncateRequest,
)
from flashpoint_server.routes.problem_schema import problems
from flashpoint_server.routes.saved import SavedDescription, SavedList

_MODELS = (
    CacheRequest, ForkRequest, DeleteRequest, TruncateRequest, CacheDescription, CacheList, CacheLength,
    SavedDescription, SavedList,
)  # fmt: skip
_ALWAYS = (400, 401, 403, 404, 408, 413, 421, 422, 429, 503, 504)
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string", "maxLength": 128},
    "description": "a name of this write: sent again with it, it is not made again, and is answered alike",
}  # fmt: skip
REPLICA = {
    "name": "X-Flashpoint-Replica", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "that of an earlier answer about the cache: a balancer routes by it",
}  # fmt: skip
TOLD = {"X-Flashpoint-Replica": {"schema": {"type": "string"}, "description": "what leads to the server of the caches"}}
_LAYER = {"name": "layer", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 0}}


def add(document: dict[str, Any]) -> None:
    """Add the operations and their schemas to a document."""
    schemas = document["components"]["schemas"]
    for model in _MODELS:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        schemas[schema["title"]] = schema
    schemas["CacheList"]["properties"]["caches"]["items"] = {"$ref": "#/components/schemas/Cache"}
    schemas["SavedList"]["properties"]["saved"]["items"] = {"$ref": "#/components/schemas/SavedForward"}
    one = "/caches/{id}"
    read = _operation("k and v of a layer", "cache_tensors", 200, None, None, 409, 410)
    read["parameters"] = [_ID, _LAYER, REPLICA]
    read["responses"]["200"]["content"] = {wire.MEDIA_TYPE: _BINARY}
    document["paths"] |= {
        "/caches": {
            "post": _operation("Make caches", "create_caches", 201, CacheList, CacheRequest, 410),
            "get": _operation("The caller's caches", "list_caches", 200, CacheList),
        },
        "/caches/fork": {
            "post": _operation("Copy caches; copies share memory", "fork_caches", 201, CacheList, ForkRequest, 409, 410)
        },
        "/caches/delete": {
            "post": _operation("Delete caches, all or none", "delete_caches", 204, None, DeleteRequest, 410)
        },
        one: {
            "get": _of_one(_operation("One cache", "cache", 200, CacheDescription, None, 410)),
            "delete": _of_one(_operation("Delete it, after the calls that run", "delete_cache", 204, None, None, 410)),
        },
        f"{one}/append": {"post": _of_one(_appended())},
        f"{one}/truncate": {
            "post": _of_one(
                _operation("Drop its last tokens", "truncate_cache", 200, CacheDescription, TruncateRequest, 409, 410)
            )
        },
        f"{one}/renew": {
            "post": _of_one(
                _operation("Let its time to live begin anew", "renew_cache", 200, CacheDescription, None, 410)
            )
        },
        f"{one}/tensors": {"get": read},
        "/saved": {"get": _operation("The caller's saved forwards", "list_saved", 200, SavedList)},
        "/saved/{id}": {
            "get": _of_one(_operation("One saved forward", "saved", 200, SavedDescription, None, 410)),
            "delete": _of_one(_operation("Delete it, after the calls that run", "delete_saved", 204, None, None, 410)),
        },
    }


def _appended() -> dict[str, Any]:
    """Return the operation of an append, whose tensors come in either encoding."""
    found = _operation("Write tokens to a layer", "append_to_cache", 200, CacheLength, None, 409, 410)
    properties = {
        **{name: {"$ref": "#/components/schemas/JsonTensor"} for name in ("k", "v")},
        "dtype": {"enum": list(jsonwire.DTYPES), "default": "float32"},
        "layout": {"enum": list(LAYOUTS), "default": "bhsd"},
        "layer": {"type": "integer", "minimum": 0, "default": 0},
        "at": {"type": ["integer", "null"], "minimum": 0, "description": "the end of the layer where it is not given"},
    }
    asked = {"type": "object", "properties": properties, "required": ["k", "v"], "additionalProperties": False}
    content = {jsonwire.MEDIA_TYPE: {"schema": asked}, wire.MEDIA_TYPE: _BINARY, "application/octet-stream": _BINARY}
    found["requestBody"] = {"required": True, "content": content}
    found["parameters"].append(_KEY)
    found["responses"] |= {str(status): one for status, one in problems(415).items()}
    return found


def _of_one(operation: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of an address with an id."""
    operation["parameters"].insert(0, _ID)
    return operation


def _operation(
    summary: str, name: str, success: int, answer: type[BaseModel] | None, asked: type[BaseModel] | None = None,
    *errors: int,
) -> dict[str, Any]:  # fmt: skip
    said: dict[str, Any] = {"description": summary, "headers": TOLD}
    if answer is not None:
        said["content"] = {jsonwire.MEDIA_TYPE: {"schema": _reference(answer)}}
    statuses = sorted({*_ALWAYS, *errors, *((415,) if asked is not None else ())})
    found: dict[str, Any] = {
        "tags": ["caches"],
        "summary": summary,
        "operationId": name,
        "parameters": [REPLICA],
        "responses": {str(success): said, **{str(status): one for status, one in problems(*statuses).items()}},
    }
    if asked is not None:
        found["requestBody"] = {"required": True, "content": {jsonwire.MEDIA_TYPE: {"schema": _reference(asked)}}}
        found["parameters"].append(_KEY)
    return found


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.model_config.get('title') or model.__name__}"}
