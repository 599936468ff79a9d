"""A directory in the temporary one that lasts as long as its process, and the removal of those of processes that died.

Its process holds a lock on the directory (flock), which the kernel releases when the process ends, however that
happens. A directory whose lock is free belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

log = structlog.stdlib.get_logger("flashpoint.scratch")

_PREFIX = "flashpoint-serve-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def directory() -> Iterator[Path]:
    """A new directory that this user alone can read, until the end of the context. Raises OSError."""
    path, lock = _new()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _new() -> tuple[Path, int]:
    """Its path, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Between its creation and its lock another start may have taken it for one that was left, and removed it.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, _OPEN)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def remove_left() -> None:
    """Remove the directories of this user's processes that were killed before they could do it."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:  # none that can be written to
        return
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # a link, no directory, or removed meanwhile
            lock = os.open(path, _OPEN)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    _remove(path, lock)
            finally:
                os.close(lock)


def _remove(path: Path, lock: int) -> None:
    """Remove a directory unless the process that it belongs to lives. Raises OSError."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
        log.info("removed the files of a killed process", path=str(path))
