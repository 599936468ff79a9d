"""Describe /caches and /saved in OpenAPI."""

from __future__ import annotations

from http import HTTPStatus
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
_EACH = (
    "malformed_head", "unauthorized", "forbidden", "cross_site", "not_found", "host_not_allowed", "invalid_request",
    "queue_full", "key_limit", "not_ready", "draining", "out_of_memory", "engine_lost", "deadline_exceeded",
)  # fmt: skip
_BODY = ("malformed_body", "body_timeout", "body_too_large", "unsupported_media_type")
_CACHE = ("cache_not_found", "cache_lost", "cache_elsewhere")
_SAVED = ("saved_not_found", "saved_lost", "cache_elsewhere")
_NEW = ("cache_memory", "work_too_large")  # errors of calls that need memory
_OFF = "this server has no caches and saved forwards: --cache-bytes is 0"
_IS_NO_NUMBER = "X-Timeout-Ms: must be a positive integer of milliseconds"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string", "maxLength": 128},
    "description": "A name of this write. A retry with the same name takes effect once and gets the same answer.",
}  # fmt: skip
REPLICA = {
    "name": "X-Flashpoint-Replica", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "The value from an earlier answer about the cache. A balancer routes by it.",
}  # fmt: skip
TOLD = {
    "X-Flashpoint-Replica": {
        "schema": {"type": "string"},
        "description": "Send it with the next call, which then reaches the same server.",
    }
}
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
    codes = (*_CACHE, "cache_position", "not_acceptable")
    read = _operation("Read k and v of a layer", "cache_tensors", 200, None, None, *codes)
    read["parameters"] = [_ID, _LAYER, REPLICA]
    read["responses"]["200"]["content"] = {wire.MEDIA_TYPE: _BINARY}
    document["paths"] |= {
        "/caches": {
            "post": _operation(
                "Create caches", "create_caches", 201, CacheList, CacheRequest, *_CACHE, *_NEW,
                invalid_request="kv_heads: has 2 values for 4 layers",
            ),
            "get": _operation("List your caches", "list_caches", 200, CacheList),
        },
        "/caches/fork": {
            "post": _operation(
                "Fork caches; copies share memory", "fork_caches", 201, CacheList, ForkRequest, *_CACHE, *_NEW,
                "cache_position", "cache_dropped", "cache_stale",
                invalid_request="lengths: has 1 numbers for 2 caches",
            )
        },
        "/caches/delete": {
            "post": _operation(
                "Delete several caches, or none of them", "delete_caches", 204, None, DeleteRequest, *_CACHE,
                invalid_request="caches: is missing",
            )
        },
        one: {
            "get": _of_one(_operation("Describe a cache", "cache", 200, CacheDescription, None, *_CACHE)),
            "delete": _of_one(
                _operation("Delete a cache, after its running calls", "delete_cache", 204, None, None, *_CACHE)
            ),
        },
        f"{one}/append": {"post": _of_one(_appended())},
        f"{one}/truncate": {
            "post": _of_one(
                _operation(
                    "Drop the last tokens of a cache", "truncate_cache", 200, CacheDescription, TruncateRequest,
                    *_CACHE, "cache_position", "cache_dropped", "cache_stale",
                    invalid_request="length: is missing",
                )
            )
        },
        f"{one}/renew": {
            "post": _of_one(
                _operation("Restart a cache's time to live", "renew_cache", 200, CacheDescription, None, *_CACHE)
            )
        },
        f"{one}/tensors": {"get": read},
        "/saved": {"get": _operation("List your saved forwards", "list_saved", 200, SavedList)},
        "/saved/{id}": {
            "get": _of_one(_operation("Describe a saved forward", "saved", 200, SavedDescription, None, *_SAVED)),
            "delete": _of_one(
                _operation("Delete a saved forward, after its running calls", "delete_saved", 204, None, None, *_SAVED)
            ),
        },
    }  # fmt: skip


def _appended() -> dict[str, Any]:
    """Return the operation of an append, which takes tensors in both formats."""
    codes = (*_CACHE, *_NEW, *_BODY, "cache_position", "cache_dropped", "cache_full", "cache_stale")
    found = _operation(
        "Append tokens to a layer", "append_to_cache", 200, CacheLength, None, *codes, invalid_request="k: is missing"
    )
    properties = {
        **{name: {"$ref": "#/components/schemas/JsonTensor"} for name in ("k", "v")},
        "dtype": {"enum": list(jsonwire.DTYPES), "default": "float32"},
        "layout": {"enum": list(LAYOUTS), "default": "bhsd"},
        "layer": {"type": "integer", "minimum": 0, "default": 0},
        "at": {"type": ["integer", "null"], "minimum": 0, "description": "Position; by default the layer's end."},
    }
    asked = {"type": "object", "properties": properties, "required": ["k", "v"], "additionalProperties": False}
    content = {jsonwire.MEDIA_TYPE: {"schema": asked}, wire.MEDIA_TYPE: _BINARY, "application/octet-stream": _BINARY}
    found["requestBody"] = {"required": True, "content": content}
    found["parameters"].append(_KEY)
    return found


def _of_one(operation: dict[str, Any]) -> dict[str, Any]:
    """Return the operation of a path with an id."""
    operation["parameters"].insert(0, _ID)
    return operation


def _operation(
    summary: str, name: str, success: int, answer: type[BaseModel] | None, asked: type[BaseModel] | None = None,
    *errors: str, **details: str,
) -> dict[str, Any]:  # fmt: skip
    said: dict[str, Any] = {"description": HTTPStatus(success).phrase, "headers": TOLD}
    if answer is not None:
        said["content"] = {jsonwire.MEDIA_TYPE: {"schema": _reference(answer)}}
    codes = {*_EACH, *errors, *(_BODY if asked is not None else ())}
    refusals = problems(*codes, **{"not_found": _OFF, "invalid_request": _IS_NO_NUMBER, **details})
    found: dict[str, Any] = {
        "tags": ["caches"],
        "summary": summary,
        "operationId": name,
        "parameters": [REPLICA],
        "responses": {str(success): said, **{str(status): one for status, one in refusals.items()}},
    }
    if asked is not None:
        found["requestBody"] = {"required": True, "content": {jsonwire.MEDIA_TYPE: {"schema": _reference(asked)}}}
        found["parameters"].append(_KEY)
    return found


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.model_config.get('title') or model.__name__}"}
