"""The record of `make gpu`: a JSON lines file; each row is appended as soon as it is measured.

Each row is written by one `write` and one `fsync`, so that a later crash of the process or the machine cannot remove
it. Existing lines never change. Reading skips a line that a power failure has cut off, and the next row begins on a new
line.

A row has `key`, the name of the measurement; `of`, everything that its figures depend on (device, versions, hashes of
the sources); `stage`, `at`, `seconds`, `clocks`, `environment`; `task`, the parameters; and `result` or `failed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FILE = "rows.jsonl"


class Record:
    """The rows of a record, on disk and in memory. Threads and processes may append at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        _sync_folder(path.parent)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._write(b"\n")
        self.rows: list[Row] = read(path)

    def append(self, *rows: Row) -> None:
        """Add rows; when this returns, they are on disk."""
        with self._lock:
            self._write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            self.rows += rows

    def bring(self, path: Path) -> int:
        """Add the rows of another record that this record lacks, and return their number."""
        known = {json.dumps(row) for row in self.rows}
        missing = [row for row in read(path) if json.dumps(row) not in known]
        self.append(*missing)
        return len(missing)

    def reload(self) -> None:
        """Read the rows that other processes have appended."""
        self.rows = read(self.path)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written to {self.path}: is the disk full?")
        os.fsync(self._file)


def read(path: Path) -> list[Row]:
    """Return the rows of a record, oldest first, without incomplete lines."""
    return [row for line in path.read_bytes().splitlines() if (row := _parsed(line)) is not None]


def latest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the newest row of each key, in the order in which the keys were first recorded."""
    return {row["key"]: row for row in rows}


def current(rows: Iterable[Row], environment: Row) -> list[Row]:
    """Return the rows whose figures come from this environment: its device, versions and sources."""
    return [row for row in rows if all(environment.get(name) == value for name, value in row["of"].items())]


def is_bad(row: Row) -> bool:
    """Return whether a row shows a fault. A row that says why a task cannot run here is not bad."""
    result = row.get("result") or {}
    wrong = result.get("ok") is False or result.get("outcome") == "failed" or "wrong_by" in result
    return "failed" in row or wrong


def _parsed(line: bytes) -> Row | None:
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) and "key" in row else None


def _sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that the name of a new file is stored."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
