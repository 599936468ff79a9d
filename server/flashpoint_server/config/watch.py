"""Files that are read again when they change: keys and certificates, so that their rotation needs no signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

SECONDS = 2.0  # between two looks

_Stamp = tuple[int, int, int, int] | None  # None: there is no such file


class Watch:
    """`files` as they were when this was made; `run` calls `changed` whenever one is another.

    A look follows symbolic links, since Kubernetes changes a Secret by swapping one. A file's state is kept before the
    file is read, so a file that is still being written is read once more.
    """

    def __init__(self, files: Iterable[Path | None], changed: Callable[[], None]) -> None:
        self._files = [path for path in files if path is not None]
        self._changed = changed
        self._found = self._look()

    def _look(self) -> list[_Stamp]:
        return [_stamp(path) for path in self._files]

    def look(self) -> None:
        """Call `changed` where a file is another than at the last look."""
        if (found := self._look()) != self._found:
            self._found = found
            self._changed()

    async def run(self) -> None:
        """Look every two seconds, until cancelled."""
        while self._files:
            await asyncio.sleep(SECONDS)
            self.look()


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
