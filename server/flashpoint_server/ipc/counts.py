"""Counts shared by all HTTP processes: each process has its own column in memory that all of them map.

A block of the memory is a table of doubles: some single numbers, then rows with one column for each process. A process
writes only its own columns, so no lock is needed. When a process dies, the supervisor clears its columns; so does the
process's successor.
"""

from __future__ import annotations

from typing import NamedTuple

from flashpoint_server.ipc.memory import NamedMemory

MOST_PROCESSES = 256
SINGLES = 4  # numbers at the start of a file that belong to no process
_NUMBER = 8  # bytes of a number, a float64
_TABLE = "counts."  # the start of the names of these blocks


class WorkerGroup(NamedTuple):
    """The HTTP processes that share counts: their memory, the number of this process, and how many there may be.

    Without a memory, this process is the only one.
    """

    memory: NamedMemory | None = None
    process: int = 0
    processes: int = MOST_PROCESSES


class Table:
    """The numbers in the block `name`, with `rows` rows. `memory` has the block at `offset`, which can be locked."""

    def __init__(self, name: str, shared: WorkerGroup, rows: int) -> None:
        self.memory = shared.memory or NamedMemory()
        size = _NUMBER * (SINGLES + rows * MOST_PROCESSES)
        block, self.offset = self.memory.block(_TABLE + name, size)
        self.numbers = memoryview(block)[:size].cast("d")
        starts = range(SINGLES, len(self.numbers), MOST_PROCESSES)
        columns = 1 if shared.memory is None else shared.processes
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
        if shared.memory is None:
            rows = [memoryview(bytearray(_NUMBER)).cast("d") for _ in names]
        else:
            self._table = Table("service.counts", shared, len(names))  # no name of an API key has a dot
            rows = self._table.rows
        self.requests, self.bytes, self.flops, self.seconds, self.arriving, self.staged, self.wanted = rows


def clear(memory: NamedMemory, process: int) -> None:
    """Clear the counts of a process that has ended."""
    for name in memory.names():
        if name.startswith(_TABLE):
            block, _ = memory.block(name, 0)
            numbers = memoryview(block).cast("d")
            for at in range(SINGLES + process, len(numbers), MOST_PROCESSES):
                numbers[at] = 0
