"""The queue of lines for stderr, and the thread that writes them.

A program that reads our stderr may stop reading. Writes to the full pipe then block without limit, but they block only
the writer thread: all other threads put their lines into the queue. If the queue is full, new lines are dropped and
counted.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

STDERR = 2
ROOM = 1 << 20  # maximum bytes in the queue
ATOMIC = 4096  # bytes: a write of this size or less to a pipe is not mixed with other processes' lines (PIPE_BUF)
PAUSE = 0.02  # seconds between two writes under load, because a write takes Python's lock from the event loop
FLUSH_SECONDS = 0.5  # maximum wait for the reader when the process ends: an engine has one second to end


def _notice(dropped: int) -> bytes:
    return b"%d lines were dropped: nobody read stderr fast enough" % dropped


class Lines:
    """The queue and its writer thread. `notice` makes the line that says how many lines were dropped."""

    def __init__(self) -> None:
        self.notice: Callable[[int], bytes] = _notice
        # Reentrant: while this thread holds the lock, the garbage collector may run a finaliser that logs a warning.
        self._lock = threading.RLock()
        self._slept = threading.Condition(self._lock)
        self._wake = threading.Lock()
        self._wake.acquire()  # `put` releases it to wake the thread up
        self._lines: list[bytes] = []
        self._bytes = 0  # bytes in the queue or being written
        self._unsaid = 0  # number of lines dropped since the last notice
        self._uncounted = 0  # number of lines dropped since the last call of `dropped`
        self._broken = False  # whether the last write failed
        self._asleep = True

    def start(self) -> None:
        """Start the writer thread, for which the process waits at most FLUSH_SECONDS before it ends."""
        threading.Thread(target=self._run, name="log writer", daemon=True).start()
        atexit.register(self.flush)

    def put(self, line: bytes) -> None:
        """Queue a line, without its newline. Never waits for the reader of stderr."""
        with self._lock:
            if self._bytes >= ROOM:
                self._unsaid += 1
                self._uncounted += 1
                return
            self._lines.append(line)
            self._bytes += len(line) + 1
            if not self._asleep:
                return
            self._asleep = False
        self._wake.release()

    def dropped(self) -> int:
        """Return how many lines were dropped since the last call."""
        if not self._uncounted:
            return 0
        with self._lock:
            count, self._uncounted = self._uncounted, 0
        return count

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until all lines are written, for at most `seconds`. Called before the process ends."""
        with self._lock:
            self._slept.wait_for(lambda: self._asleep, seconds)

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            while self._write_all():
                time.sleep(PAUSE)

    def _write_all(self) -> bool:
        """Write the queued lines, then a notice if lines were dropped. Return whether there was anything to write."""
        with self._lock:
            lines, self._lines = self._lines, []
            # After a failed write, do not write a notice alone: it could fail again, without end.
            unsaid = 0 if self._broken and not lines else self._unsaid
            self._unsaid -= unsaid
            if not (lines or unsaid):
                self._asleep = True
                self._slept.notify_all()
                return False
        for count, piece in _pieces(lines):
            self._write(piece, count)
        if unsaid:
            self._write(self.notice(unsaid) + b"\n", 0)
            if self._broken:
                with self._lock:
                    self._unsaid += unsaid
        return True

    def _write(self, piece: bytes, count: int) -> None:
        """Write a piece of `count` lines. If the write fails, they count as dropped."""
        left = memoryview(piece)
        while left:
            try:
                left = left[os.write(STDERR, left) :]
                self._broken = False
            except BlockingIOError:  # another process has made the pipe or terminal non-blocking
                select.select([], [STDERR], [])
            except OSError:
                self._broken = True
                break
        with self._lock:
            if count:
                self._bytes -= len(piece)
            if self._broken:
                self._unsaid += count
                self._uncounted += count


def _pieces(lines: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number of lines, piece): lines with newlines, joined up to ATOMIC bytes; a longer line is one piece."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        if piece and size + len(line) + 1 > ATOMIC:
            yield len(piece), b"\n".join(piece) + b"\n"
            piece, size = [], 0
        piece.append(line)
        size += len(line) + 1
    if piece:
        yield len(piece), b"\n".join(piece) + b"\n"


class _Text(io.TextIOBase):
    """A `sys.stderr` that queues lines, for tracebacks and for libraries that print."""

    encoding = "utf-8"

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._rest = ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            self._lines.put(line.encode(self.encoding, "backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)


LINES = Lines()
_began = False


def take_stderr(notice: Callable[[int], bytes] = _notice) -> None:
    """Send everything that Python writes to stderr through LINES. `notice` makes the line about dropped lines."""
    global _began
    LINES.notice = notice
    if not _began:
        _began = True
        LINES.start()
        sys.stderr = _Text(LINES)
