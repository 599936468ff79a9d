"""HTTP processes share counts in a file: each writes its column, and the column of a dead process can be cleared."""

import subprocess
import sys

from flashpoint_server.ipc.counts import Counts, Table, WorkerGroup, clear

WRITER = """
import sys
from pathlib import Path
from flashpoint_server.ipc.counts import Counts, WorkerGroup
counts = Counts(WorkerGroup(Path(sys.argv[1]), 1, 3))
counts.requests[counts.column], counts.seconds[counts.column] = 5, 0.25
"""


def test_counts_of_another_process_are_seen_until_they_are_cleared(tmp_path):
    here = Counts(WorkerGroup(tmp_path, 0, 3))
    here.requests[here.column] = 2
    subprocess.run([sys.executable, "-c", WRITER, tmp_path], check=True)
    assert (list(here.requests), list(here.seconds), sum(here.bytes)) == ([2, 5, 0], [0, 0.25, 0], 0)
    clear(tmp_path, 1)
    assert (list(here.requests), list(here.seconds)) == ([2, 0, 0], [0, 0, 0])


def test_a_successor_begins_with_nothing_and_leaves_the_others(tmp_path):
    tables = [Table("some", WorkerGroup(tmp_path, n, 2), 2) for n in range(2)]
    tables[0].numbers[0] = 9  # a number outside the rows, which belongs to no process
    for n, table in enumerate(tables):
        for row in table.rows:
            row[n] = 1
    successor = Table("some", WorkerGroup(tmp_path, 1, 2), 2)
    assert [list(row) for row in successor.rows] == [[1, 0], [1, 0]]
    assert successor.numbers[0] == 9


def test_without_a_directory_a_process_counts_alone():
    one, other = Counts(), Counts()
    one.bytes[one.column] = 7
    assert (list(one.bytes), list(other.bytes)) == ([7], [0])
