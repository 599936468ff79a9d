"""Convert a pydantic error into the contract's error messages, one for each wrong field."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from flashpoint_contract import caches, saved
from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.options import OPTIONS, CausalAlignment, FieldProblem, Pair
from flashpoint_contract.saved import SAVED_OPTIONS
from flashpoint_contract.schemas.shapes import Shape
from flashpoint_contract.tensors import TENSORS
from flashpoint_contract.wording.hints import NAMES, did_you_mean, each_meant

# Message by the type of the pydantic error, formatted with its context. Pydantic's messages name Python types.
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
    "list_type": "must be a list",
    "model_type": "must be an object",
    "too_short": "takes {min_length} at least, not {actual_length}",
    "too_long": "takes {max_length} at most, not {actual_length}",
    "value_error": "{error}",
}


ALIGNMENTS = get_args(CausalAlignment)
OF_ATTENTION = (*NAMES, *CACHE_OPTIONS, *SAVED_OPTIONS)  # names of the tensors and options of attention calls


def field_problems(error: ValidationError, known: Iterable[str] = OF_ATTENTION) -> list[FieldProblem]:
    """Return a `FieldProblem` for each wrong field, named by its path such as `shapes.q_len`; "" is the whole value.

    The message for an unknown name suggests the most similar of `known`, the names that the JSON object may have. The
    message for an option of another endpoint names that endpoint.
    """
    errors = error.errors(include_url=False)
    unknown = [str(e["loc"][0]) for e in errors if e["type"] == "extra_forbidden" and len(e["loc"]) == 1]
    elsewhere = dict(caches.refused(unknown) + saved.refused(dict.fromkeys(unknown, True)))
    near = each_meant(unknown, known)
    hints = {name: f"unknown option or tensor{hint}" for name, hint in near} | elsewhere
    hints |= {name: "is a tensor, not an option: send it with the tensors" for name in unknown if name in TENSORS}
    inside = {e["loc"][:depth] for e in errors for depth in range(len(e["loc"]))}  # the places around each error
    meant = {_field(e) for e in errors if not e["type"].endswith("_type")}
    return [FieldProblem(_field(e), _say(e, hints)) for e in errors if not _follows(e, inside, meant)]


# Matches a union member's type name in a pydantic error's path: constrained-int, list[constrained-int].
_OF_UNION = re.compile(r"constrained-\w+|\w+\[.*\]")


def _field(error: Any) -> str:
    """Return the path of a wrong field, without the numbers of items and the types of a union."""
    return ".".join(part for part in error["loc"] if isinstance(part, str) and not _OF_UNION.fullmatch(part))


def _follows(error: Any, inside: Container[tuple[int | str, ...]], meant: Container[str]) -> bool:
    """Return whether an error is only a consequence of another one.

    `inside` has the places that contain the place of another error; `meant` the fields with an error other than a wrong
    type.

    Such errors are: a default that depends on a wrong field; a list that is too short because an item was wrong; and,
    for a field of several types, the errors of the types that the value was not meant to have.
    """
    if error["type"] == "default_factory_not_called":
        return True
    place = error["loc"]
    if error["type"].endswith("_type") and any(isinstance(part, str) and _OF_UNION.fullmatch(part) for part in place):
        return _field(error) in meant
    return error["type"] == "too_short" and place in inside


def _say(error: Any, hints: Mapping[str, str]) -> str:
    place = error["loc"]
    if error["type"] == "extra_forbidden":
        if len(place) > 1 and place[0] in ("shape", "shapes"):
            return f"unknown size{did_you_mean(str(place[-1]), Shape.model_fields)}"
        return hints.get(str(place[0]), "unknown option or tensor")
    if place == ("causal",) and error["input"] in ALIGNMENTS:
        return f"{said(error)}; causal_alignment takes {error['input']}"
    if error["type"] == "tuple_type" and place[-1] in OPTIONS and isinstance(kind := OPTIONS[place[-1]].kind, Pair):
        return kind.message
    return said(error)


def said(error: Any) -> str:
    """Return the message for a pydantic error."""
    kind, place = error["type"], error["loc"]
    if kind == "missing" and isinstance(place[-1], int):
        return f"item {place[-1] + 1} is missing"
    if kind in _SAID:
        return _SAID[kind].format_map(error.get("ctx", {}))
    return str(error["msg"]).replace("Input should be", "must be")
