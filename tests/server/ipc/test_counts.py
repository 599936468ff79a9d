"""HTTP processes share counts in memory: each writes its column, and the column of a dead process can be cleared."""

import subprocess
import sys

from flashpoint_server.ipc.counts import Counts, Table, WorkerGroup, clear
from flashpoint_server.ipc.memory import NamedMemory

WRITER = """
import sys
from flashpoint_server.ipc.counts import Counts, WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory
counts = Counts(WorkerGroup(NamedMemory(int(sys.argv[1])), 1, 3))
counts.requests[counts.column], counts.seconds[counts.column] = 5, 0.25
"""


def test_counts_of_another_process_are_seen_until_they_are_cleared():
    memory = NamedMemory()
    here = Counts(WorkerGroup(memory, 0, 3))
    here.requests[here.column] = 2
    subprocess.run([sys.executable, "-c", WRITER, str(memory.fd)], pass_fds=[memory.fd], check=True)
    assert (list(here.requests), list(here.seconds), sum(here.bytes)) == ([2, 5, 0], [0, 0.25, 0], 0)
    clear(memory, 1)
    assert (list(here.requests), list(here.seconds)) == ([2, 0, 0], [0, 0, 0])


def test_a_successor_begins_with_nothing_and_leaves_the_others():
    memory = NamedMemory()
    tables = [Table("some", WorkerGroup(memory, n, 2), 2) for n in range(2)]
    tables[0].numbers[0] = 9  # a number outside the rows, which belongs to no process
    for n, table in enumerate(tables):
        for row in table.rows:
            row[n] = 1
    successor = Table("some", WorkerGroup(memory, 1, 2), 2)
    assert [list(row) for row in successor.rows] == [[1, 0], [1, 0]]
    assert successor.numbers[0] == 9


def test_without_a_memory_a_process_counts_alone():
    one, other = Counts(), Counts()
    one.bytes[one.column] = 7
    assert (list(one.bytes), list(other.bytes)) == ([7], [0])
