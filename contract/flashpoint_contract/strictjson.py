"""Strict JSON: no duplicate keys, no NaN literals, and no text that cannot be encoded again.

JSON has no NaN and no infinities: messages contain the strings `WORDS` instead.
"""

from __future__ import annotations

import json
import math
from typing import Any

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return result


def _constant(name: str) -> Any:
    raise ValueError(f'{name} is not JSON: write "{name}" in fields that take it')


def written(number: float) -> float | str:
    """Return a number unchanged, or NaN or an infinity as its string in `WORDS`."""
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def loads(text: bytes | str, *, words: bool = False) -> Any:
    """Return the value of `text`. Raises ValueError for everything that is not strict UTF-8 JSON, at any depth.

    With `words`, the literals NaN, Infinity and -Infinity, which Python's json module writes, become strings.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=str if words else _constant)
        # An escape may be half a surrogate pair. No encoder could send that back, for example in an error message.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value
