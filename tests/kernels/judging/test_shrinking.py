"""The smallest failing case in a report fails again alone, from its saved file and by the reported command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

import flashpoint_kernels
from flashpoint.cases import read_case
from flashpoint_kernels.judging import shrinking
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.process import Worker
from flashpoint_kernels.judging.signatures import signature_of
from flashpoint_kernels.judging.trial import Clock, Trial
from tests.judge.corpus import WRONG
from tests.judge.small import judged, late


def test_the_saved_case_and_the_command_repeat_the_failure(tmp_path: Path) -> None:
    report = judged(late, save=tmp_path / "case.safetensors")
    assert report.verdict == "wrong"
    assert report.causes[0].code in ("key-limit", "last-tile")
    assert report.smallest is not None
    assert report.saved == str(tmp_path / "case.safetensors")
    tensors, options = read_case(tmp_path / "case.safetensors")
    problem = {n: torch.from_numpy(t) for n, t in tensors.items()}
    answers = {n: problem.pop(n) for n in ("o", "dq", "dk", "dv") if n in problem}
    verification = flashpoint_kernels.verify(problem, flashpoint_kernels.Options(**options), answers=answers)
    assert not verification.ok
    assert report.command is not None
    words = shlex.split(report.command)
    case = json.loads(words[words.index("--case") + 1])
    again = flashpoint_kernels.judge(late, only=case)
    assert (again.verdict, again.cases) == ("wrong", 1)
    assert again.failures[0].error == report.smallest.error


def test_the_command_of_an_interpreted_kernel_sets_the_interpreter() -> None:
    worker = Worker(f"{late.__module__}:{late.__name__}", "cpu")
    trial = Trial(worker, signature_of(worker.start()), Clock(1e9), precision="ieee", timeout=60.0, nan_rows=False)
    try:
        failed = trial.run(Case(q_len=20, kv_len=20, seed=3))
        plain = shrinking.command(trial, failed, "m:f", [], guessed=False)
        trial.interpreted = True
        interpreted = shrinking.command(trial, failed, "m:f", [], guessed=False)
    finally:
        trial.close()
        worker.close()
    assert plain is not None
    assert plain.startswith("flashpoint verify --kernel m:f --case ")
    assert interpreted == f"TRITON_INTERPRET=1 {plain}"


@pytest.mark.slow
def test_the_smallest_case_alone_names_the_same_cause() -> None:
    """The smallest case has more than two keys: with two, a causal mask that hides one key too few hides none."""
    report = flashpoint_kernels.judge(WRONG["sees_next"].function, quick=True, dtype="float32", seed=0, seconds=900.0)
    assert report.smallest is not None
    assert report.smallest.case["kv_len"] > 2
    assert {failure.relation for failure in report.failures} == {"accuracy"}  # a check of single calls
    again = flashpoint_kernels.judge(WRONG["sees_next"].function, only=report.smallest.case)
    assert {cause.code for cause in again.causes} == {report.causes[0].code} == {"causal-by-one"}
