"""Show results in a notebook: as an HTML table, and as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Picture(bytes):
    """An SVG file, which a notebook displays as a picture."""

    def _repr_svg_(self) -> str:
        return self.decode()


def picture(function: str, *arguments: Any) -> Picture:
    """Return the picture that a function of `flashpoint.plots` draws.

    The module is imported here, because it imports the classes that use this function. Raises ModuleNotFoundError if
    matplotlib is not installed.
    """
    try:
        return Picture(getattr(importlib.import_module("flashpoint.plots"), function)(*arguments))
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        what = "a picture needs matplotlib: pip install '.[plot]' in a checkout"
        raise ModuleNotFoundError(what, name=error.name) from error


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(_text(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
