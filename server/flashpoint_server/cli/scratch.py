"""Temporary directories that exist as long as their process, and removal of directories that killed processes left.

A process holds a lock (flock) on its directory. The kernel releases the lock whenever the process ends. A directory
without a lock can be removed.
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
    """Create a directory that only this user can read, and remove it at the end of the context. Raises OSError."""
    path, lock = _new()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _new() -> tuple[Path, int]:
    """Return the path of a new directory, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Another process that calls `remove_left` may remove the directory before it is locked.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, _OPEN)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def remove_left() -> None:
    """Remove the directories that killed processes of this user have left."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:  # raised if no temporary directory is writable
        return
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # the path is a link or no directory, or it was already removed
            lock = os.open(path, _OPEN)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    _remove(path, lock)
            finally:
                os.close(lock)


def _remove(path: Path, lock: int) -> None:
    """Remove a directory unless its process is alive. Raises OSError."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
        log.info("removed the files of a killed process", path=str(path))
