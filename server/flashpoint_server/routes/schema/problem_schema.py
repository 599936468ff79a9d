"""The error responses of an operation in OpenAPI: status, codes, headers and an example of each code."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flashpoint_contract.options import BackendRenamedError
from flashpoint_server.refusal import MEDIA_TYPE, STATUS, TYPES, Refusal, invalid

_NOT_TEXT = "a body of type text/plain is not supported; send "
JSON_ALONE = f"{_NOT_TEXT}application/json"  # the detail of `unsupported_media_type` for a call without tensors
# The `detail` of each example. In `invalid_request`, the name of the field stands before the colon.
DETAILS = {
    "malformed_body": "the body is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)",
    "malformed_head": "an HTTP/1.1 request needs exactly one Host field, and this one has 2",
    "unauthorized": "the request has no valid API key: send Authorization: Bearer KEY",
    "forbidden": "the API key lacks the permission for this call",
    "cross_site": "a browser sent this request for a page of another site (origin 'https://example.org'): start the "
    "server with --cors-origins (FLASHPOINT_CORS_ORIGINS), which lists the allowed origins",
    "not_found": "the benchmark does not exist, or is no longer stored",
    "cache_not_found": "this cache does not exist, or belongs to another API key",
    "saved_not_found": "this saved forward does not exist, or belongs to another API key",
    "not_acceptable": "answers are application/vnd.safetensors or application/json, but Accept allows neither",
    "body_timeout": "the body arrived too slowly: it may pause for 10 s, and must average 65536 bytes a second",
    "cache_position": "position 4096 is beyond the end, 1024",
    "cache_dropped": "position 100 is before 1024, the first position that `keep` retains",
    "cache_full": "4097 tokens exceed its max_length of 4096",
    "cache_stale": "its idempotency key is older than the cache's last write: this is a late copy of an earlier call",
    "cache_lost": "the engine that held the cache restarted",
    "saved_lost": "the engine that held the saved forward restarted",
    "body_too_large": "the body of 2147483648 bytes (2 GiB) exceeds the limit of 1073741824 bytes (1 GiB)",
    "work_too_large": "the request needs at least 214748364800 bytes (200 GiB), "
    "and the device has 150120000000 bytes (140 GiB)",
    "unsupported_media_type": f"{_NOT_TEXT}application/vnd.safetensors or application/json",
    "host_not_allowed": "the server does not accept the host 'example.org': use a loopback name, for example "
    "localhost, or start the server with --allowed-hosts (FLASHPOINT_ALLOWED_HOSTS), which lists the accepted hosts",
    "cache_elsewhere": "replica 'b' holds the cache: send X-Flashpoint-Replica: b",
    "backend_renamed": BackendRenamedError().args[0],
    "invalid_request": "casual: unknown option or tensor; did you mean causal?",
    "idempotency_key_reused": "its idempotency key belongs to another call: send each call with a key of its own",
    "queue_full": "the queue is full: it has 256 requests, its limit",
    "key_limit": "the API key may have 4 requests at the same time",
    "cache_memory": "4294901760 of 4294967296 bytes are in use, and this call needs 131072 more",
    "head_too_large": "the request's head exceeds 65536 bytes, or 128 fields or parameters: send less in it",
    "internal_error": "the server failed: a bug, logged with this request's id",
    "transfer_encoding": "Transfer-Encoding 'gzip' is not supported, only 'chunked': send the body unencoded, with "
    "Content-Length or chunked",
    "not_ready": "the engine is starting",
    "draining": "the server is shutting down",
    "out_of_memory": "the device ran out of memory for this request; retry, or send a smaller request",
    "engine_lost": "the engine died while it ran this request; retry",
    "deadline_exceeded": "the request's deadline passed before the answer was ready: set a longer one, or retry later",
}
_REQUEST_ID = "a0d96e92bd1e2fe723a60c2cacae8d48"
_OF_CACHES = {code for code in STATUS if code.startswith("cache_")} - {"cache_memory", "cache_elsewhere"}
_HEADERS = {
    401: {"WWW-Authenticate": "Always `Bearer`."},
    415: {"Accept-Post": "The media types that the server accepts."},
    429: {"Retry-After": "Seconds to wait before the next try."},
    503: {"Retry-After": "Seconds to wait before the next try."},
}


class FieldError(BaseModel):
    loc: list[str] = Field(description="The name of the field.", examples=[["causal"]])
    msg: str = Field(description="The problem, and the allowed values.")


class ProblemDocument(BaseModel):
    """An error, as RFC 9457 defines it. `code` distinguishes errors with the same status."""

    model_config = ConfigDict(title="Problem")
    type: str = Field(f"{TYPES}invalid_request", description="The page of this server that explains the code.")
    title: str = Field(description="The standard phrase of the status.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="The problem, and what to do.")
    code: str = Field(description="The error code.", json_schema_extra={"enum": [*sorted(STATUS)]})
    request_id: str = Field(description="The id of the request. The server's log contains it, too.")
    errors: list[FieldError] | None = Field(None, description="One entry for each wrong field or cache.")


def problems(*codes: str, **details: str) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of an operation, by status as text.

    `details` replace the `detail` in the examples of some codes.
    """
    by_status: dict[int, list[str]] = {}
    for code in sorted(codes, key=[*STATUS].index):
        by_status.setdefault(STATUS[code], []).append(code)
    responses: dict[int | str, dict[str, Any]] = {}
    for status, same in by_status.items():
        examples = {code: {"summary": code, "value": _example(code, details.get(code, DETAILS[code]))} for code in same}
        responses[str(status)] = {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(same)}",
            "headers": text_headers(_HEADERS.get(status, {})),
            "content": {MEDIA_TYPE: {"schema": reference("Problem"), "examples": examples}},
        }
    return responses


def text_headers(texts: dict[str, str]) -> dict[str, Any]:
    """Return header fields of an OpenAPI response. `texts` are their descriptions by name."""
    return {name: {"schema": {"type": "string"}, "description": text} for name, text in texts.items()}


def reference(name: str) -> dict[str, Any]:
    """Return an OpenAPI reference to the schema with this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _example(code: str, detail: str) -> dict[str, Any]:
    if code == "invalid_request":
        field, _, message = detail.partition(": ")
        return invalid([(field, message)]).document(_REQUEST_ID)
    errors = [("caches.0", f"{code}: {detail}")] if code in _OF_CACHES else []
    return Refusal(code, detail, errors=errors).document(_REQUEST_ID)
