"""The problem document as OpenAPI shows it, and the statuses that come with it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flashpoint_server.refusal import MEDIA_TYPE, STATUS, TYPES

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    405: {"Allow": "the methods of the address"},
    415: {"Accept-Post": "the types that are taken"},
    429: {"Retry-After": "seconds"},
    503: {"Retry-After": "seconds"},
}


class FieldError(BaseModel):
    loc: list[str] = Field(examples=[["window"]])
    msg: str


class ProblemDocument(BaseModel):
    """RFC 9457. `code` tells apart what shares a status; `request_id` finds the server's log line."""

    model_config = ConfigDict(title="Problem")
    type: str = Field(f"{TYPES}invalid_request", description="the page of this server that explains the code")
    title: str
    status: int
    detail: str
    code: str = Field(json_schema_extra={"enum": [*sorted(STATUS)]})
    request_id: str
    errors: list[FieldError] | None = Field(None, description="the fields that are wrong, with status 422")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of an operation that are errors: what each status is for, its headers, and the document."""
    return {
        status: {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(c for c, s in STATUS.items() if s == status)}",
            "headers": {
                name: {"schema": {"type": "string"}, "description": text}
                for name, text in _HEADERS.get(status, {}).items()
            },
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }
