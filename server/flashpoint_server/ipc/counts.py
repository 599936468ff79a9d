"""Counts shared by all HTTP processes: each process has its own column in memory that all of them map.

A file is a table of doubles: some single numbers, then rows with one column for each process. A process writes only its
own columns, so no lock is needed. When a process dies, the supervisor clears its columns; so does the process's
successor.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

MOST_PROCESSES = 256
SINGLES = 4  # numbers at the start of a file that belong to no process
_NUMBER = 8  # bytes of a number, a float64


class WorkerGroup(NamedTuple):
    """The HTTP processes that share counts: their directory, the number of this process, and how many there may be.

    Without a directory, this process is the only one.
    """

    directory: Path | None = None
    process: int = 0
    processes: int = MOST_PROCESSES


class Table:
    """The numbers in the file `name`, with `rows` rows. `fd` stays open as long as the table is used."""

    def __init__(self, name: str, shared: WorkerGroup, rows: int) -> None:
        if shared.directory is None:
            self.fd = os.memfd_create(f"flashpoint-{name}", os.MFD_CLOEXEC)
        else:
            self.fd = os.open(shared.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = _NUMBER * (SINGLES + rows * MOST_PROCESSES)
        os.ftruncate(self.fd, size)
        self.numbers = memoryview(mmap.mmap(self.fd, size)).cast("d")
        starts = range(SINGLES, len(self.numbers), MOST_PROCESSES)
        columns = 1 if shared.directory is None else shared.processes
        self.rows = [self.numbers[start : start + columns] for start in starts]
        for row in self.rows:
            row[shared.process] = 0  # remove the counts of a former process with this number


class Counts:
    """The counts of the whole service in rows: `sum(row)` is for all HTTP processes, `row[column]` for this one.

    Admission, staging memory and gRPC update their own rows.
    """

    def __init__(self, shared: WorkerGroup = WorkerGroup()) -> None:  # noqa: B008  # a tuple
        names = ("requests", "bytes", "flops", "seconds", "arriving", "staged", "wanted")
        self.column = shared.process
        if shared.directory is None:
            rows = [memoryview(bytearray(_NUMBER)).cast("d") for _ in names]
        else:
            self._table = Table("service.counts", shared, len(names))  # no file of an API key has a dot in its name
            rows = self._table.rows
        self.requests, self.bytes, self.flops, self.seconds, self.arriving, self.staged, self.wanted = rows


def clear(directory: Path, process: int) -> None:
    """Clear the counts of a process that has ended."""
    for path in directory.iterdir():
        with path.open("r+b") as file:
            starts = range(SINGLES * _NUMBER, path.stat().st_size, MOST_PROCESSES * _NUMBER)
            for start in starts:
                file.seek(start + process * _NUMBER)
                file.write(bytes(_NUMBER))
