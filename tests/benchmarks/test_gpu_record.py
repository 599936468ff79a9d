"""The record of `make gpu`, a file of JSON lines, keeps all earlier rows after a crash of the process or machine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.record import Record, current, is_bad, latest, read


def row(key: str, **more: Any) -> dict[str, Any]:
    return {"key": key, "of": {"device": "a"}, "result": {"ms": 1.0}, **more}


def test_a_row_is_on_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    sync = os.fsync

    def seen(file: int) -> None:
        sync(file)
        synced.append((tmp_path / "rows.jsonl").read_bytes())

    record = Record(tmp_path / "rows.jsonl")
    monkeypatch.setattr(os, "fsync", seen)
    record.append(row("a"))
    assert synced == [json.dumps(row("a")).encode() + b"\n"]
    record.append(row("b"))
    assert len(synced) == 2
    assert read(record.path) == record.rows == [row("a"), row("b")]
    record.close()


@pytest.mark.parametrize("tail", [b'{"key": "b", "of"', b"\x00\x00\xff", b"{}", b'["key"]'])
def test_a_line_that_was_cut_off_is_skipped_and_the_next_row_begins_a_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(row("a")).encode() + b"\n" + tail)
    record = Record(path)
    record.append(row("c"))
    assert [r["key"] for r in read(path)] == ["a", "c"]
    assert path.read_bytes().startswith(json.dumps(row("a")).encode() + b"\n" + tail + b"\n"), "existing bytes stay"
    record.close()


def test_two_writers_share_a_record(tmp_path: Path) -> None:
    """Two processes append to one file: gpu.py, and the pytest that gpu.py starts."""
    one, other = Record(tmp_path / "rows.jsonl"), Record(tmp_path / "rows.jsonl")
    one.append(row("a"))
    other.append(row("b"))
    one.append(row("c"))
    one.reload()
    assert [r["key"] for r in one.rows] == ["a", "b", "c"]
    one.close()
    other.close()


def test_rows_of_another_record_are_brought_once(tmp_path: Path) -> None:
    old, new = Record(tmp_path / "old.jsonl"), Record(tmp_path / "deep" / "new.jsonl")
    old.append(row("a"))
    old.append(row("b"))
    new.append(row("b"))
    assert new.bring(old.path) == 1
    assert new.bring(old.path) == new.bring(new.path) == 0
    assert [r["key"] for r in read(new.path)] == ["b", "a"]
    old.close()
    new.close()


def test_rows_count_where_all_that_they_depend_on_is_the_same() -> None:
    here = {"device": "a", "torch": "2", "sources": "x", "python": "3"}
    rows = [
        row("peer", of={"device": "a", "torch": "2"}),
        row("ours", of={"device": "a", "torch": "2", "sources": "x"}),
        row("older", of={"device": "a", "torch": "2", "sources": "w"}),
        row("elsewhere", of={"device": "b", "torch": "2"}),
        row("unknown", of={"device": "a", "triton": "3"}),
    ]
    assert [r["key"] for r in current(rows, here)] == ["peer", "ours"]
    again = row("peer", result={"ms": 2.0})
    assert latest([*rows, again])["peer"] is again


@pytest.mark.parametrize(
    ("more", "bad"),
    [
        ({"result": {"ms": 1.0}}, False),
        ({"result": {"ms": None, "skipped": "is not installed"}}, False),
        ({"result": {"ms": None, "refused": "out of shared memory"}}, False),
        ({"result": {"outcome": "skipped"}}, False),
        ({"result": {"ok": True}}, False),
        ({"result": {"ok": False}}, True),
        ({"result": {"ms": None, "wrong_by": 0.5}}, True),
        ({"result": {"outcome": "failed"}}, True),
    ],
)
def test_what_does_not_work_is_bad_and_what_cannot_run_is_not(more: dict[str, Any], bad: bool) -> None:
    assert is_bad(row("a", **more)) is bad
    failed = row("a", failed="the process ended: SIGSEGV")
    del failed["result"]
    assert is_bad(failed)
