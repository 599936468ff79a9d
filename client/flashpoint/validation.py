"""What is wrong with a document, in the contract's words: the fields of a pydantic error."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from flashpoint.errors import FieldProblem


def field_problems(error: ValidationError) -> list[FieldProblem]:
    """Each field that is wrong, by the names that lead to it (`shapes.q_len`); no name where the whole is."""
    return [
        FieldProblem(".".join(part for part in e["loc"] if isinstance(part, str)), _say(e))
        for e in error.errors(include_url=False)
        if e["type"] != "default_factory_not_called"  # it follows from a field that is wrong itself
    ]


def _say(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "is not an option of this call"
    return str(error["ctx"]["error"] if error["type"] == "value_error" else error["msg"])
