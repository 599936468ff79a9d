"""What is wrong with a document, in the contract's words: the fields of a pydantic error."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from flashpoint.errors import FieldProblem

# What is said by the type of pydantic's error, of its context. Its own words speak of Python's types.
_SAID = {
    "extra_forbidden": "unknown option or tensor",
    "missing": "is missing",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "model_type": "must be an object",
    "too_short": "takes {min_length} at least, not {actual_length}",
    "too_long": "takes {max_length} at most, not {actual_length}",
    "value_error": "{error}",
}


def field_problems(error: ValidationError) -> list[FieldProblem]:
    """Each field that is wrong, by the names that lead to it (`shapes.q_len`); no name where the whole is."""
    found = error.errors(include_url=False)
    return [
        FieldProblem(".".join(part for part in e["loc"] if isinstance(part, str)), _say(e))
        for e in found
        if not _follows(e, found)
    ]


def _follows(error: Any, found: list[Any]) -> bool:
    """Whether it only says that another is there: of a default of its neighbour, or of a list that lost an item."""
    if error["type"] == "default_factory_not_called":
        return True
    place = error["loc"]
    return error["type"] == "too_short" and any(e is not error and e["loc"][: len(place)] == place for e in found)


def _say(error: Any) -> str:
    kind, place = error["type"], error["loc"]
    if kind == "missing" and isinstance(place[-1], int):
        return f"item {place[-1] + 1} is missing"
    if kind in _SAID:
        return _SAID[kind].format_map(error.get("ctx", {}))
    return str(error["msg"]).replace("Input should be", "must be")
