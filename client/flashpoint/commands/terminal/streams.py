"""Write text to stdout and stderr of any encoding: characters that the terminal cannot show become ASCII."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys

# Replace one character by one where possible, so that the columns of a table stay aligned.
_PLAIN = str.maketrans({
    "·": "-", "–": "-", "−": "-", "—": "-", "…": "...", "×": "x", "✓": "+", "✗": "x", "→": "->", "∞": "inf", "≤": "<=",
    "≥": ">=", "≠": "!=", "∘": "*", "√": "sqrt", "Σ": "sum", "ᵀ": "^T", "µ": "u", "§": "section ", "²": "^2", "³": "^3",
    "≈": "~", "‘": "'", "’": "'", "“": '"', "”": '"', "━": "-", "╸": "-", "╺": "-", "─": "-",
})  # fmt: skip
_ERRORS = "flashpoint-plain"


def plain(text: str) -> str:
    """Return `text` in ASCII: known symbols by their usual spelling, anything else as an escape such as \\xe9."""
    return text.translate(_PLAIN).encode("ascii", "backslashreplace").decode("ascii")


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


codecs.register_error(_ERRORS, _replace)


class _Closed(io.TextIOBase):
    """Stands in the place of a stdout that the caller has closed. A write fails, so that no result is lost silently."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._holder = os.open(os.devnull, os.O_WRONLY)  # otherwise the next file or socket would become stdout

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "stdout is closed")


def prepare() -> None:
    """Make stdout and stderr write any text to a terminal, a pipe or a file of any encoding.

    Text for a closed stderr is dropped; a write to a closed stdout raises OSError.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            closed = _Closed() if name == "stdout" else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, closed)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def writable(text: str) -> str:
    """Return `text` with the characters that stdout can show."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, _ERRORS).decode(encoding)


def is_unicode() -> bool:
    """Return whether stdout writes every character as it is."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
