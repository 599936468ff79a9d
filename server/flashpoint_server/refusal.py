"""The errors that the server answers, as problem documents of RFC 9457; /v2 and gRPC have other formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from flashpoint_contract.options import ProblemError

MEDIA_TYPE = "application/problem+json"
TYPES = "/docs/errors#"  # with an error code appended: the path of the page that explains the error

STATUS = {
    "malformed_body": 400,
    "malformed_head": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "cross_site": 403,
    "not_found": 404,
    "cache_not_found": 404,
    "saved_not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "body_timeout": 408,
    "cache_position": 409,
    "cache_dropped": 409,
    "cache_full": 409,
    "cache_stale": 409,
    "cache_lost": 410,
    "saved_lost": 410,
    "body_too_large": 413,
    "work_too_large": 413,
    "unsupported_media_type": 415,
    "host_not_allowed": 421,
    "cache_elsewhere": 421,
    "invalid_request": 422,
    "backend_renamed": 422,
    "idempotency_key_reused": 422,
    "queue_full": 429,
    "key_limit": 429,
    "cache_memory": 429,
    "head_too_large": 431,
    "internal_error": 500,
    "transfer_encoding": 501,
    "not_ready": 503,
    "draining": 503,
    "out_of_memory": 503,
    "engine_lost": 503,
    "deadline_exceeded": 504,
}
MOST_ERRORS = 32  # maximum number of fields that one answer reports as wrong
LONGEST_NAME = 200  # characters of a name or a value in an error
LONGEST_MESSAGE = 600  # characters of one error
_LONG_NAME = re.compile(rf"\S{{{LONGEST_NAME + 1},}}")
_RETRY_SOON = ("queue_full", "key_limit", "cache_memory", "not_ready", "out_of_memory", "engine_lost")
_RETRY_AFTER = dict.fromkeys(_RETRY_SOON, 1) | {"draining": 5}  # seconds


class Refusal(Exception):  # noqa: N818  # an answer to the caller, not a failure of the server
    """Raised to answer a request with an error. `code` is a key of `STATUS`; `errors` are (field, message) pairs."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        errors: Iterable[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.errors = tuple(errors)
        self.detail = detail if self.errors else shortened(detail)
        self.status = STATUS[code]
        self.headers = dict(headers or {})
        if code in _RETRY_AFTER:
            self.headers.setdefault("Retry-After", str(_RETRY_AFTER[code]))
        if code == "draining":  # a load balancer must open a new connection, which then leads to another server
            self.headers["Connection"] = "close"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Refusal, self.code, self.detail, errors=self.errors, headers=self.headers), ()

    def document(self, request_id: str) -> dict[str, Any]:
        """Return the problem document. Its `type` is the path of the page that explains `code`."""
        document: dict[str, Any] = {
            "type": f"{TYPES}{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "request_id": request_id,
        }
        if self.errors:
            document["errors"] = [{"loc": [field], "msg": message} for field, message in self.errors]
        return document

    def body(self, request_id: str) -> bytes:
        return json.dumps(self.document(request_id), ensure_ascii=False).encode("utf-8", "replace")


Writer = Callable[[Refusal, str], tuple[str, bytes]]  # (refusal, request id) -> (media type, body)


def problem(refusal: Refusal, request_id: str) -> tuple[str, bytes]:
    """Return the media type and the body of a problem document."""
    return MEDIA_TYPE, refusal.body(request_id)


def shortened(text: str) -> str:
    """Return an error's text with the middle of long words (a caller's names or values) and of a long text cut out."""
    if len(text) <= LONGEST_NAME:
        return text
    return _cut(_LONG_NAME.sub(lambda match: _cut(match[0], LONGEST_NAME), text), LONGEST_MESSAGE)


def _cut(text: str, limit: int) -> str:
    end = limit // 3
    return text if len(text) <= limit else f"{text[: limit - end - 1]}…{text[-end:]}"


def invalid(errors: Iterable[tuple[str, str]], code: str = "invalid_request") -> Refusal:
    """Return a 422 that names at most MOST_ERRORS wrong fields. The field "" means the whole request."""
    listed = tuple(
        (_cut(field or "request", LONGEST_NAME), shortened(message)) for field, message in islice(errors, MOST_ERRORS)
    )
    return Refusal(code, "; ".join(f"{field}: {message}" for field, message in listed), errors=listed)


def of_problem(error: ProblemError) -> Refusal:
    """Return the 422 for a problem that is not valid."""
    return invalid(error.errors, error.code)


def out_of_time() -> Refusal:
    detail = "the request's deadline passed before the answer was ready: set a longer one, or retry later"
    return Refusal("deadline_exceeded", detail)
