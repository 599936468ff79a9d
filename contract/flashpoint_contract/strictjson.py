"""JSON as the standard has it: no duplicate keys, no NaN literals, no text that could not be written back."""

from __future__ import annotations

import json
from typing import Any


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def loads(text: bytes | str, *, words: bool = False) -> Any:
    """The value of `text`. Raises ValueError for anything that is not strict, UTF-8 JSON, however deep or long.

    With `words` the literals NaN, Infinity and -Infinity, which Python's own writers leave, are those words as strings.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=str if words else _constant)
        # An escape may spell half a surrogate pair, which no encoder could send back, in an error's text say.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value
