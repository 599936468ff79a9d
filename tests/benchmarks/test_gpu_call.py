"""`make gpu-call` runs its parts within their limits, loses no row, and proves the service on a CPU too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_call, gpu_serve
from benchmarks.gpu_call import Part, call
from benchmarks.gpu_day import cache
from benchmarks.gpu_day.checkout import ROOT, python_path

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


def test_the_record_says_which_kernels_a_part_compiled_and_which_it_found(tmp_path: Path) -> None:
    lines = [("a", "1", True), ("a", "1", False), ("a", "2", False), ("b", "3", True), ("b", "4", True)]
    notes = "".join(json.dumps(dict(zip(("kernel", "key", "compiled"), one, strict=True))) + "\n" for one in lines)
    (tmp_path / "notes.py").write_text(f"import os; open(os.environ['{cache.NOTES}'], 'w').write({notes!r})")
    assert call(
        [Part("one", 60, [str(tmp_path / "notes.py")]), Part("two", 60, ["-c", "pass"])],
        tmp_path,
        600,
        dict(os.environ),
    )
    first, second = rows(tmp_path / gpu_call.FILE)
    assert (first["compiled"], first["from_cache"]) == ({"a": 1, "b": 2}, {"a": 1})
    assert (second["compiled"], second["from_cache"]) == ({}, {})


def test_a_call_brings_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "cache" / "KEY"
    entry.mkdir(parents=True)
    (entry / "__grp__kernel.json").write_text(
        json.dumps({"child_paths": {"kernel.cubin": str(entry / "kernel.cubin")}})
    )
    (entry / "kernel.cubin").write_text("compiled")
    cache.pack(tmp_path / "cache", tmp_path / "packed", 1)
    found = tmp_path / "found"

    def nothing(*_: object) -> bool:
        assert (found / "KEY" / "kernel.cubin").read_text() == "compiled"
        return True

    monkeypatch.setattr(gpu_call, "call", nothing)
    folders = {"--out": "out", "--compiled": "packed", "--cache": "found"}
    assert gpu_call.main([text for name, of in folders.items() for text in (name, str(tmp_path / of))]) == 0


@pytest.mark.slow
def test_a_process_notes_what_triton_compiles_and_what_it_finds(tmp_path: Path) -> None:
    code = """
import torch
from flashpoint_kernels import Options, Problem, triton_backend
from flashpoint_kernels.triton_backend.tools import ahead

ahead.pretend(80)
q = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
triton_backend.compile_ahead([Problem.create({"q": q, "k": q, "v": q}, Options())]).result()
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_CACHE_MANAGER": cache.MANAGER}
    made = []
    for number in range(2):
        notes = tmp_path / str(number)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env | {cache.NOTES: str(notes)}, check=True)
        made.append(cache.counts(notes))
    assert made[0]["compiled"]["attention_forward"] >= 1
    assert made[0]["from_cache"] == made[1]["compiled"] == {}
    assert made[1]["from_cache"] == made[0]["compiled"]


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
