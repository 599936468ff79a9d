"""`make gpu-call` runs its parts within their limits, loses no row, and proves the service on a CPU too."""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_call, gpu_serve
from benchmarks.gpu_call import Part, call
from benchmarks.gpu_day.checkout import python_path

HANGS = "import signal; print('began', flush=True); signal.pause()"


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_part_that_hangs_is_killed_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_call, "_SAVED", 0.5)
    monkeypatch.setattr(gpu_call, "_GRACE", 0.5)
    todo = [
        Part("hangs", 5, ["-c", HANGS]),
        Part("fails", 60, ["-c", "raise SystemExit(3)"]),
        Part("works", 60, ["-c", "print({seconds})"]),
    ]
    assert not call(todo, tmp_path, 600, dict(os.environ))
    assert [(row["part"], row["code"]) for row in rows(tmp_path / gpu_call.FILE)] == [
        ("hangs", None), ("fails", 3), ("works", 0),
    ]  # fmt: skip
    assert (tmp_path / "hangs.log").read_text() == "began\n"
    assert float((tmp_path / "works.log").read_text()) == 59.5


def test_without_time_a_part_does_not_start(tmp_path: Path) -> None:
    assert not call([Part("late", 60, ["-c", "print(1)"])], tmp_path, 1, dict(os.environ))
    assert rows(tmp_path / gpu_call.FILE)[0]["code"] is None
    assert not (tmp_path / "late.log").exists()


def test_the_parts_fit_into_the_call_and_the_service_comes_before_the_kernels(tmp_path: Path) -> None:
    todo = gpu_call.parts(tmp_path, tmp_path, tmp_path, tmp_path, "cuda", "c0ffee")
    assert [part.name for part in todo] == ["wheels", "service", "kernels", "rest"]
    assert sum(part.seconds for part in todo[:-1]) < gpu_call.SECONDS
    assert "typing-extensions" in gpu_serve.CARRIED & gpu_serve.needed(gpu_serve.WANTED, "3.12")


def test_the_proof_of_the_service_passes_on_a_cpu(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.gpu_day.service", str(tmp_path), "--device", "cpu", "--seconds", "{seconds}"]
    variables = {**os.environ, "PYTHONPATH": python_path(*filter(None, sys.path))}
    right = call([Part("service", 300, command)], tmp_path, 600, variables)
    steps = rows(tmp_path / "service.jsonl")
    assert right, steps
    assert [step["step"] for step in steps] == [
        "ready", "attention", "gradients", "verify", "together", "cache", "benchmark", "stop",
    ]  # fmt: skip
    assert all(step["right"] for step in steps)
