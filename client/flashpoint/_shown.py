"""How results show themselves in a notebook: as an HTML table, and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape


class Picture(bytes):
    """An SVG file, which a notebook shows as the picture that it is."""

    def _repr_svg_(self) -> str:
        return self.decode()


def picture(draw: Callable[[], bytes]) -> Picture:
    """Return what `draw` draws. Raises ModuleNotFoundError saying what to install where matplotlib is not."""
    try:
        return Picture(draw())
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
