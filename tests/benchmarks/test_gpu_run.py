"""`make gpu` from its command line on a fake device: order, time limit, failures, and repeated measurements."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_day import plan, suites
from benchmarks.gpu_day.record import Record, read
from flashpoint_kernels.timing.case import Case
from tests.support.gpu_stand_in import StandIn, Unruly

PAPERS = [task.key for group in plan.papers(StandIn.sizes, 90) for task in group.tasks]


@pytest.fixture(autouse=True)
def _restore_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore `os.environ` and `sys.path`, which the command changes for its child processes."""
    before = dict(os.environ)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., int]:
    def run(*arguments: str, device: StandIn | None = None, **more: Any) -> int:
        folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), "--commit", "abc"]
        return gpu.main([*arguments, *folders], device or StandIn(tmp_path / "notes"), **more)

    return run


def keys(tmp_path: Path) -> list[str]:
    path = tmp_path / "out" / "rows.jsonl"
    return [row["key"] for row in read(path)] if path.exists() else []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_has_a_code_of_its_own_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]) == 3
    assert "no CUDA device here: nothing was tested and nothing was timed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["second"], "no stage: second; the stages are first, tests"), (["--resume", "nowhere"], "has no rows.jsonl")],
)
def test_a_wrong_command_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_time_that_is_over_ends_a_call_and_the_next_goes_on(tmp_path: Path, command: Callable[..., int]) -> None:
    """The fake clock passes the time limit after three rows. Stages run in the plan's order, not the arguments'."""

    def clock() -> float:
        return 0.0 if len(keys(tmp_path)) < 3 else 1e9

    assert command("decode", "papers", clock=clock) == gpu.UNFINISHED
    assert keys(tmp_path) == PAPERS[:3]
    assert f"| papers | {len(PAPERS)} | 3 | 0 |" in (tmp_path / "out" / "report.md").read_text()
    assert command("decode", "papers", clock=lambda: 0.0) == gpu.DONE
    assert keys(tmp_path)[: len(PAPERS)] == PAPERS
    stages = [row["stage"] for row in read(tmp_path / "out" / "rows.jsonl")]
    assert stages == sorted(stages, key=plan.STAGES.index)
    rows = read(tmp_path / "out" / "rows.jsonl")
    for row in rows:
        assert row["environment"]["commit"] == "abc"
        assert row["of"]["device"] == row["environment"]["device"] == "made up: no device"
    assert rows[-1]["clocks"]["sm_mhz"] == [1980, 1980]


@pytest.mark.full  # for `make test-full` alone: test_gpu_plan.py checks which smoke tests a timing needs
def test_kernels_that_fail_their_smoke_test_are_not_timed(tmp_path: Path, command: Callable[..., int]) -> None:
    command("papers", clock=lambda: 0.0 if not keys(tmp_path) else 1e9)
    record = Record(tmp_path / "out" / "rows.jsonl")
    ours = record.rows[0]
    of = {name: ours["environment"][name] for name in plan.OF_OURS}
    wrong = {"ok": False, "missing": [], "errors": {}}
    task = plan.parameters(plan.Smoke("backward_kv"))
    record.append({**ours, "key": "smoke backward_kv", "stage": "first", "of": of, "task": task, "result": wrong})
    record.close()
    assert command("papers") == gpu.FAILED
    left_out = [key for key in PAPERS if "backward" in key and key.endswith(" triton")]
    assert set(PAPERS) - set(keys(tmp_path)) == set(left_out) != set()


@pytest.mark.slow
def test_what_goes_wrong_costs_its_own_row_and_is_measured_again_where_asked(
    tmp_path: Path, command: Callable[..., int]
) -> None:
    sizes = replace(StandIn.sizes, papers=of_lengths)
    planned = [plan.Timed(case).key for case in of_lengths()]
    unruly, healed = Unruly(tmp_path / "notes"), StandIn(tmp_path / "notes")
    unruly.sizes = healed.sizes = sizes
    assert command("papers", device=unruly) == gpu.FAILED
    rows = read(tmp_path / "out" / "rows.jsonl")
    assert [row["key"] for row in rows] == planned
    assert ["failed" in row for row in rows] == [False, True, True, False]
    assert "illegal memory access" in rows[1]["failed"]
    assert rows[2]["failed"] == "the process ended: SIGSEGV"
    assert command("papers", device=unruly) == gpu.FAILED
    assert len(keys(tmp_path)) == 4, "failed tasks are not retried by default"
    assert command("papers", "--again", device=healed) == gpu.DONE
    assert keys(tmp_path)[4:] == planned[1:3]


def of_lengths() -> list[Case]:
    lengths = (16, Unruly.LOSES, Unruly.CRASHES, 32)
    return [Case(backend="sdpa_flash", batch=1, q_heads=1, q_len=n, head_dim=16) for n in lengths]


SAMPLE = """
import os, time, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "as it must"
def test_skips(): pytest.skip("no reason")
def test_crashes(): os._exit(3)
def test_hangs(): time.sleep(3600)
def test_warns():
    import warnings
    warnings.warn("old", DeprecationWarning)
"""


@pytest.mark.slow
def test_each_test_is_a_row_when_it_ends_and_what_is_known_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = tmp_path / "test_made_up.py"
    sample.write_text(SAMPLE)
    (tmp_path / "test_unread.py").write_text("import nothing_of_this_name")
    monkeypatch.setattr(suites, "files", lambda suite: [str(sample)])
    os.environ["PYTHONPATH"] = gpu.checkout.python_path()
    record = tmp_path / "rows.jsonl"
    shared = {"stage": "tests", "of": {"device": "cpu"}}

    def run(known: list[str], seconds: float = 600) -> int:
        suite = plan.Suite("sample", (), {}, seconds=10)
        return suites.run(suite, record, shared, known, "cpu", 1, seconds, tmp_path / "tests.log")

    assert run([]) == 1
    results = {row["key"].rpartition("::")[2]: row["result"] for row in read(record)}
    assert {name: each["outcome"] for name, each in results.items()} == {
        "test_passes": "passed", "test_fails": "failed", "test_skips": "skipped", "test_crashes": "failed",
        "test_hangs": "failed", "test_warns": "passed",
    }  # fmt: skip
    assert "as it must" in results["test_fails"]["message"]
    assert "crashed while running" in results["test_hangs"]["message"]
    assert all(row["of"] == shared["of"] for row in read(record))
    known = [row["key"].removeprefix("test sample ") for row in read(record) if "test_skips" not in row["key"]]
    assert run(known) in (0, 5)
    assert [row["key"].rpartition("::")[2] for row in read(record)[6:]] == ["test_skips"]
    assert run([name for name in known if "test_hangs" not in name], seconds=0) == suites.CUT_OFF
    monkeypatch.setattr(suites, "files", lambda suite: [str(tmp_path / "test_unread.py")])
    assert run([]) != 0
    unread = [row["result"] for row in read(record) if row["key"].endswith("test_unread.py")]
    assert [each["outcome"] for each in unread] == ["failed"]
    assert "nothing_of_this_name" in unread[0]["message"]
