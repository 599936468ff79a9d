"""The error responses of an operation in OpenAPI: their statuses and codes, their headers, and an example of each."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flashpoint_server.refusal import MEDIA_TYPE, STATUS, TYPES, Refusal, invalid

# The `detail` of each example. `invalid_request` has the name of the field before the colon.
DETAILS = {
    "malformed_body": "the body is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)",
    "malformed_head": "an HTTP/1.1 request has exactly one Host field, and this has 2",
    "unauthorized": "the request has no valid API key: send Authorization: Bearer KEY",
    "forbidden": "the API key lacks the permission for this call",
    "cross_site": "a browser sent this for a page of another site (origin 'https://example.org'): start the server "
    "with --cors-origins (FLASHPOINT_CORS_ORIGINS), which names the origins whose pages may call it",
    "not_found": "there is no such benchmark, or none any more",
    "cache_not_found": "there is no such cache for this key",
    "saved_not_found": "there is no such saved forward for this key",
    "not_acceptable": "answers are application/vnd.safetensors or application/json, and Accept takes neither",
    "body_timeout": "the body arrived too slowly: it may pause for 10 s, and must reach 65536 bytes a second",
    "cache_position": "4096 is beyond the end, 1024",
    "cache_dropped": "position 100 is before 1024, the first that `keep` has left",
    "cache_full": "4097 tokens are over its max_length of 4096",
    "cache_stale": "its idempotency key came before the cache's last write: this is a late copy of an earlier call",
    "cache_lost": "its engine restarted",
    "saved_lost": "its engine restarted",
    "body_too_large": "a body of 2147483648 bytes is over the limit of 1073741824",
    "work_too_large": "this needs at least 214748364800 bytes where the device has 150120000000",
    "unsupported_media_type": "a body of type text/plain is not taken; send application/vnd.safetensors or "
    "application/json",
    "host_not_allowed": "this server does not answer to the host 'example.org': call it by a loopback name, such as "
    "localhost, or start it with --allowed-hosts (FLASHPOINT_ALLOWED_HOSTS), which names the hosts that it answers to",
    "cache_elsewhere": "replica 'b' holds it: send X-Flashpoint-Replica: b",
    "invalid_request": "casual: unknown option or tensor; did you mean causal?",
    "queue_full": "256 requests are being served, as many as the server admits",
    "key_limit": "the key's limit is 4 requests at once",
    "cache_memory": "4294901760 of 4294967296 bytes are held, and this needs 131072 more",
    "head_too_large": "the request's head is over 65536 bytes, or over 128 fields",
    "internal_error": "an error of the server, logged with this request's id",
    "transfer_encoding": "Transfer-Encoding 'gzip' is not read, only 'chunked': send the body as it is, with its "
    "Content-Length or in chunks",
    "not_ready": "the engine is starting",
    "draining": "the server is shutting down",
    "out_of_memory": "the device ran out of memory for this request",
    "engine_lost": "the engine died with this request; it may be sent again",
    "deadline_exceeded": "the deadline passed before the answer was ready: X-Timeout-Ms sets it",
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
    msg: str = Field(description="The fault, and what is allowed.")


class ProblemDocument(BaseModel):
    """An error, as RFC 9457 defines it. `code` distinguishes errors of one status."""

    model_config = ConfigDict(title="Problem")
    type: str = Field(f"{TYPES}invalid_request", description="The page of this server that explains the code.")
    title: str = Field(description="The standard phrase of the status.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="The fault, and what to do.")
    code: str = Field(description="The error code.", json_schema_extra={"enum": [*sorted(STATUS)]})
    request_id: str = Field(description="The id of the request, which the server's log has too.")
    errors: list[FieldError] | None = Field(None, description="Each field or cache that is wrong.")


def problems(*codes: str, **details: str) -> dict[int | str, dict[str, Any]]:
    """Return the responses of an operation that are errors, by status.

    `details` replace the `detail` of the examples of some codes.
    """
    found: dict[int | str, dict[str, Any]] = {}
    for code in sorted(codes, key=[*STATUS].index):
        status = STATUS[code]
        if status not in found:
            found[status] = _response(status)
        response = found[status]
        response["description"] += f"{', ' if response['content'][MEDIA_TYPE]['examples'] else ': '}{code}"
        value = _example(code, details.get(code, DETAILS[code]))
        response["content"][MEDIA_TYPE]["examples"][code] = {"summary": code, "value": value}
    return found


def _response(status: int) -> dict[str, Any]:
    said = _HEADERS.get(status, {})
    headers = {name: {"schema": {"type": "string"}, "description": text} for name, text in said.items()}
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}}
    return {"description": HTTPStatus(status).phrase, "headers": headers, "content": content}


def _example(code: str, detail: str) -> dict[str, Any]:
    if code == "invalid_request":
        field, _, message = detail.partition(": ")
        return invalid([(field, message)]).document(_REQUEST_ID)
    errors = [("caches.0", f"{code}: {detail}")] if code in _OF_CACHES else []
    return Refusal(code, detail, errors=errors).document(_REQUEST_ID)
