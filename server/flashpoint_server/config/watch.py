"""Watch the files of keys and certificates, so that the server reads changed files without a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

SECONDS = 2.0  # seconds between two checks

_Stamp = tuple[int, int, int, int] | None  # None: the file does not exist


class Watch:
    """Calls `changed` when one of `files` changes after this object was made.

    A check follows symbolic links, because Kubernetes changes a Secret by replacing a link. It stores the files' state
    before `changed` reads them: if a file is still being written then, the next check calls `changed` again.
    """

    def __init__(self, files: Iterable[Path | None], changed: Callable[[], None]) -> None:
        self._files = [path for path in files if path is not None]
        self._changed = changed
        self._stamps = self._look()

    def _look(self) -> list[_Stamp]:
        return [_stamp(path) for path in self._files]

    def look(self) -> None:
        """Call `changed` if a file has changed since the last check."""
        if (stamps := self._look()) != self._stamps:
            self._stamps = stamps
            self._changed()

    async def run(self) -> None:
        """Check every two seconds until cancelled."""
        while self._files:
            await asyncio.sleep(SECONDS)
            self.look()


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
