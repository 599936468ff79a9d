"""Turn a pydantic error into the contract's messages, one per field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from flashpoint.errors import FieldProblem
from flashpoint_contract import caches, saved
from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.hints import NAMES, each_meant
from flashpoint_contract.saved import SAVED_OPTIONS

# Messages by the type of pydantic's error, formatted with its context. Pydantic's own messages name Python's types.
_SAID = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "model_type": "must be an object",
    "too_short": "takes {min_length} at least, not {actual_length}",
    "too_long": "takes {max_length} at most, not {actual_length}",
    "value_error": "{error}",
}


_CALLS = (*NAMES, *CACHE_OPTIONS, *SAVED_OPTIONS)


def field_problems(error: ValidationError, known: Iterable[str] = ()) -> list[FieldProblem]:
    """Return each field that is wrong, by the names that lead to it (`shapes.q_len`); no name where the whole is.

    An unknown name gets a hint: a name of the contract, or one of those that are `known` beside. An option of another
    call is refused with the name of that call.
    """
    found = error.errors(include_url=False)
    unknown = [str(e["loc"][0]) for e in found if e["type"] == "extra_forbidden" and len(e["loc"]) == 1]
    elsewhere = dict(caches.refused(unknown) + saved.refused(dict.fromkeys(unknown, True)))
    near = each_meant(unknown, (*known, *_CALLS))
    hints = {name: f"unknown option or tensor{hint}" for name, hint in near} | elsewhere
    return [
        FieldProblem(".".join(part for part in e["loc"] if isinstance(part, str)), _say(e, hints))
        for e in found
        if not _follows(e, found)
    ]


def _follows(error: Any, found: list[Any]) -> bool:
    """Whether it only says that another is there: of a default of its neighbour, or of a list that lost an item."""
    if error["type"] == "default_factory_not_called":
        return True
    place = error["loc"]
    return error["type"] == "too_short" and any(e is not error and e["loc"][: len(place)] == place for e in found)


def _say(error: Any, hints: Mapping[str, str]) -> str:
    if error["type"] == "extra_forbidden":
        return hints.get(str(error["loc"][0]), "unknown option or tensor")
    return said(error)


def said(error: Any) -> str:
    """Return the message of one of pydantic's errors in plain words."""
    kind, place = error["type"], error["loc"]
    if kind == "missing" and isinstance(place[-1], int):
        return f"item {place[-1] + 1} is missing"
    if kind in _SAID:
        return _SAID[kind].format_map(error.get("ctx", {}))
    return str(error["msg"]).replace("Input should be", "must be")
