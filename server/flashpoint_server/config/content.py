"""Read the content of a file that may change, be damaged, or be a pipe (`<(…)`), which can be read only once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LARGEST = 16 << 20  # maximum bytes of a file of keys or certificates

_streams: dict[Path, bytes] = {}  # the contents of pipes and other files that are not regular


def content(path: Path) -> bytes:
    """Return the content of a file; that of a pipe is read at the first call. Raises ValueError."""
    try:
        if is_regular(path):
            # O_NONBLOCK: if a FIFO takes the file's place now, this must not wait for its writer
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                text = file.read(LARGEST + 1)
        elif path in _streams:
            return _streams[path]
        else:
            with path.open("rb") as file:
                text = _streams[path] = file.read(LARGEST + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > LARGEST:
        raise ValueError(f"{path} has more than {LARGEST} bytes: it must be a file of keys or certificates")
    return text


def again(path: Path) -> bytes:
    """Return the content of a file that has been read before. Raises ValueError, and never waits."""
    try:
        if path not in _streams and not is_regular(path):
            raise ValueError(f"{path} is not a regular file any more")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return content(path)


def is_regular(path: Path) -> bool:
    """Return whether a file is regular. Raises OSError."""
    return stat.S_ISREG(path.stat().st_mode)
