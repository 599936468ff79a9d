"""Memory with named blocks, which the processes of a server share by a descriptor that they inherit.

It is a file in memory (memfd): nothing is on a disk, and nothing is left behind when the processes end. It grows by
blocks, whose pages the system provides before they are used. So a lack of memory is an OSError, never a SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator

_HEADER = struct.Struct("=QH")  # bytes of the block, and of its name, which follows
_PAGE = mmap.ALLOCATIONGRANULARITY
_LOCK = struct.Struct("hhqqi")  # struct flock: type, whence, start, length, process
_GROWING = 0, 1  # the bytes to lock while the file grows: the first header, which no other lock covers


class NamedMemory:
    """Memory of this process, or the memory of another with the descriptor `fd`. Raises OSError."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            self.fd = os.memfd_create("flashpoint-shared", os.MFD_CLOEXEC)
        else:  # a description of its own: locks belong to descriptions
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._blocks: dict[str, tuple[int, int]] = {}  # by name: offset and size
        self._end = 0
        self._thread = threading.Lock()  # a lock of the file does not exclude threads of one process

    def block(self, name: str, size: int) -> tuple[mmap.mmap, int]:
        """Return the block of this name, and its offset, at which it can be locked. It is made of zeros if missing."""
        with self._thread:
            if name not in self._known():
                with self.locked(*_GROWING, wait=True):
                    if name not in self._known():
                        self._append(name, size)
                        self._known()
            offset, size = self._blocks[name]
        os.posix_fallocate(self.fd, offset, size)
        return mmap.mmap(self.fd, size, offset=offset), offset

    def names(self) -> list[str]:
        """Return the names of all blocks, in the order in which they were made."""
        with self._thread:
            return list(self._known())

    @contextlib.contextmanager
    def locked(self, start: int, length: int, *, wait: bool = False) -> Iterator[None]:
        """Hold the lock of these bytes, as one process with this memory at a time. Raises BlockingIOError."""
        self._lock(fcntl.F_WRLCK, start, length, wait=wait)
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK, start, length, wait=False)

    def _lock(self, kind: int, start: int, length: int, *, wait: bool) -> None:
        how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        fcntl.fcntl(self.fd, how, _LOCK.pack(kind, os.SEEK_SET, start, length, 0))

    def _known(self) -> dict[str, tuple[int, int]]:
        """Return all blocks, after a look at those that were made since the last look."""
        while header := os.pread(self.fd, _PAGE, self._end):
            size, length = _HEADER.unpack_from(header)
            name = header[_HEADER.size : _HEADER.size + length].decode()
            self._blocks[name] = self._end + _PAGE, size
            self._end += _PAGE + size
        return self._blocks

    def _append(self, name: str, size: int) -> None:
        """Make a block at the end; `block` provides its pages."""
        text = name.encode()
        os.pwrite(self.fd, _HEADER.pack(-(-size // _PAGE) * _PAGE, len(text)) + text, self._end)
