"""The problem document as OpenAPI shows it."""

from __future__ import annotations

from pydantic import BaseModel, Field

from flashpoint_server.refusal import STATUS


class FieldError(BaseModel):
    loc: list[str] = Field(examples=[["window"]])
    msg: str


class Problem(BaseModel):
    """RFC 9457. `code` tells apart what shares a status; `request_id` finds the server's log line."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str = Field(json_schema_extra={"enum": [*sorted(STATUS)]})
    request_id: str
    errors: list[FieldError] | None = Field(None, description="the fields that are wrong, with status 422")
