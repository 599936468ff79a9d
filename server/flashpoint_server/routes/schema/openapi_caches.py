"""Describe /caches and /saved in OpenAPI."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NamedTuple

from pydantic import BaseModel

from flashpoint_contract import wire
from flashpoint_contract.options import LAYOUTS
from flashpoint_contract.schemas import jsonwire
from flashpoint_server.routes.schema.problem_schema import JSON_ALONE, problems, reference, text_headers
from flashpoint_server.routes.tensors.cache_schema import (
    CacheDescription,
    CacheLength,
    CacheList,
    CachePage,
    CacheRequest,
    DeleteRequest,
    ForkRequest,
    TruncateRequest,
)
from flashpoint_server.routes.tensors.saved import SavedDescription, SavedList

_MODELS = (
    CacheRequest, ForkRequest, DeleteRequest, TruncateRequest, CacheDescription, CacheList, CachePage, CacheLength,
    SavedDescription, SavedList,
)  # fmt: skip
_EACH = (
    "malformed_head", "unauthorized", "forbidden", "cross_site", "not_found", "host_not_allowed", "invalid_request",
    "queue_full", "key_limit", "not_ready", "draining", "out_of_memory", "engine_lost", "deadline_exceeded",
)  # fmt: skip
_BODY = ("malformed_body", "body_timeout", "body_too_large", "unsupported_media_type")
_CACHE = ("cache_not_found", "cache_lost", "cache_elsewhere")
_SAVED = ("saved_not_found", "saved_lost", "cache_elsewhere")
_NEW = ("cache_memory", "work_too_large")  # errors of calls that allocate memory for caches
_OFF = "this server has no caches and saved forwards: --cache-bytes is 0"
_IS_NO_NUMBER = "X-Timeout-Ms: must be a positive integer of milliseconds"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string", "maxLength": 128},
    "description": "A name of this write. A retry with the same name takes effect once and gets the same answer; "
    "another call needs another name.",
}  # fmt: skip
REPLICA = {
    "name": "X-Flashpoint-Replica", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "The value from an earlier answer about the cache. A balancer routes by it.",
}  # fmt: skip
TOLD = text_headers({"X-Flashpoint-Replica": "Send it with the next call, which then reaches the same server."})
_PAGES = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "`next` of the page before."},
]
_LAYER = {"name": "layer", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 0}}


class CacheRow(NamedTuple):
    """An operation. `codes` are errors that not all operations have; `wrong` is the detail of an invalid_request."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[BaseModel] | None = None
    request: type[BaseModel] | None = None
    codes: tuple[str, ...] = ()
    wrong: str = _IS_NO_NUMBER
    success: int = 200


_WRITTEN = ("cache_position", "cache_dropped", "cache_stale")  # errors of calls that write at a position
_CALLS = (
    CacheRow("post", "/caches", "create_caches", "Create caches", CacheList, CacheRequest, (*_CACHE, *_NEW),
             "kv_heads: has 2 values for 4 layers", 201),
    CacheRow("get", "/caches", "list_caches", "List your caches", CachePage),
    CacheRow("post", "/caches/fork", "fork_caches", "Fork caches; copies share memory", CacheList, ForkRequest,
             (*_CACHE, *_NEW, *_WRITTEN), "lengths: has 1 numbers for 2 caches", 201),
    CacheRow("post", "/caches/delete", "delete_caches", "Delete several caches, or none of them", None, DeleteRequest,
             _CACHE, "caches: is missing", 204),
    CacheRow("get", "/caches/{id}", "cache", "Describe a cache", CacheDescription, None, _CACHE),
    CacheRow("delete", "/caches/{id}", "delete_cache", "Delete a cache, after its running calls", codes=_CACHE,
             success=204),
    CacheRow("post", "/caches/{id}/append", "append_to_cache", "Append tokens to a layer", CacheLength, None,
             (*_CACHE, *_NEW, *_BODY, *_WRITTEN, "cache_full"), "k: is missing"),
    CacheRow("post", "/caches/{id}/truncate", "truncate_cache", "Drop the last tokens of a cache", CacheDescription,
             TruncateRequest, (*_CACHE, *_WRITTEN), "length: is missing"),
    CacheRow("post", "/caches/{id}/renew", "renew_cache", "Restart a cache's time to live", CacheDescription, None,
             _CACHE),
    CacheRow("get", "/caches/{id}/tensors", "cache_tensors", "Read k and v of a layer",
             codes=(*_CACHE, "cache_position", "not_acceptable")),
    CacheRow("get", "/saved", "list_saved", "List your saved forwards", SavedList),
    CacheRow("get", "/saved/{id}", "saved", "Describe a saved forward", SavedDescription, None, _SAVED),
    CacheRow("delete", "/saved/{id}", "delete_saved", "Delete a saved forward, after its running calls", codes=_SAVED,
             success=204),
)  # fmt: skip


def add(document: dict[str, Any]) -> None:
    """Add the operations of /caches and /saved, and their schemas, to an OpenAPI document."""
    schemas = document["components"]["schemas"]
    for model in _MODELS:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        schemas[schema["title"]] = schema
    for listed in ("CacheList", "CachePage"):
        schemas[listed]["properties"]["caches"]["items"] = reference("Cache")
    schemas["SavedList"]["properties"]["saved"]["items"] = reference("SavedForward")
    paths = document["paths"]
    for call in _CALLS:
        paths.setdefault(call.path, {})[call.method] = _operation(call)
    _add_tensors(paths["/caches/{id}/append"]["post"])
    paths["/caches"]["get"]["parameters"] += _PAGES
    read = paths["/caches/{id}/tensors"]["get"]
    read["parameters"].insert(1, _LAYER)
    read["responses"]["200"]["content"] = {wire.MEDIA_TYPE: _BINARY}


def _add_tensors(append: dict[str, Any]) -> None:
    """Add the request body to the operation POST /caches/{id}/append. It has tensors in JSON or safetensors."""
    properties = {
        **dict.fromkeys(("k", "v"), reference("JsonTensor")),
        "dtype": {"enum": list(jsonwire.DTYPES), "default": "float32"},
        "layout": {"enum": list(LAYOUTS), "default": "bhsd"},
        "layer": {"type": "integer", "minimum": 0, "default": 0},
        "at": {"type": ["integer", "null"], "minimum": 0, "description": "Position; by default the layer's end."},
    }
    schema = {"type": "object", "properties": properties, "required": ["k", "v"], "additionalProperties": False}
    content = {jsonwire.MEDIA_TYPE: {"schema": schema}, wire.MEDIA_TYPE: _BINARY, "application/octet-stream": _BINARY}
    append["requestBody"] = {"required": True, "content": content}


def _operation(call: CacheRow) -> dict[str, Any]:
    success: dict[str, Any] = {"description": HTTPStatus(call.success).phrase, "headers": TOLD}
    if call.answer is not None:
        success["content"] = _json(call.answer)
    named = call.path.startswith("/caches") and call.method != "get"  # whether it may have an idempotency key
    codes = {*_EACH, *call.codes, *(_BODY if call.request is not None else ())}
    codes |= {"idempotency_key_reused"} if named else set()
    details = {"not_found": _OFF, "invalid_request": call.wrong}
    if call.request is not None:
        details["unsupported_media_type"] = JSON_ALONE
    refusals = problems(*codes, **details)
    operation: dict[str, Any] = {
        "tags": ["caches"],
        "summary": call.summary,
        "operationId": call.name,
        "parameters": [*([_ID] if "{id}" in call.path else []), REPLICA, *([KEY] if named else [])],
        "responses": {str(call.success): success, **refusals},
    }
    if call.request is not None:
        operation["requestBody"] = {"required": True, "content": _json(call.request)}
    return operation


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {jsonwire.MEDIA_TYPE: {"schema": reference(model.model_config.get("title") or model.__name__)}}
