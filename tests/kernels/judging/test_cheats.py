"""The judge is not recognised: functions that look for a judge, or answer late, are wrong; and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashpoint_kernels
from tests.judge.cheats import CHEATS
from tests.judge.right import formula_in_float32

ONE = {"q_len": 40, "kv_len": 50, "head_dim": 16}
QUICK = ("looks_at_the_stack", "looks_at_objects", "reads_the_judge", "patches_comparisons", "answers_when_asked")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CHEATS])
def test_a_cheat_is_wrong(name: str) -> None:
    only = None if name == "knows_the_shapes" else ONE
    report = flashpoint_kernels.judge(
        f"tests.judge.cheats:{name}", quick=True, only=only, dtype="float32", device="cpu", seed=0, timeout=30.0
    )
    assert report.verdict == "wrong", report.lines()


def test_values_differ_from_run_to_run_and_a_seed_repeats_them() -> None:
    def judged(seed: int | None) -> flashpoint_kernels.judging.Report:
        return flashpoint_kernels.judge(
            "tests.judge.cheats:looks_at_modules", quick=True, only=ONE, dtype="float32", seed=seed
        )

    first, second = judged(None), judged(None)
    assert first.seed != second.seed
    again = judged(first.seed)
    assert [each.error for each in again.failures] == [each.error for each in first.failures]
    assert [each.error for each in second.failures] != [each.error for each in first.failures]
    assert any(f"--seed {first.seed}" in line for line in first.lines())


def leaves_a_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Start a process in a session of its own, whose parent ends."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "987.125"])
        os._exit(0)
    return formula_in_float32(q, k, v)


def left_behind() -> list[int]:
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                words = (each / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", b"987.125"]:
                found.append(int(each.name))
    return found


def test_no_process_is_left() -> None:
    """Processes that a function starts end with the judgement, those in a session of their own, too."""
    try:
        report = flashpoint_kernels.judge(leaves_a_process, quick=True, only=ONE, dtype="float32", device="cpu")
        assert report.verdict == "right", report.lines()
        assert left_behind() == []
    finally:
        for pid in left_behind():
            os.kill(pid, signal.SIGKILL)


KILLED = """
import flashpoint_kernels
only = {"q_len": 40, "kv_len": 50, "head_dim": 16}
flashpoint_kernels.judge("tests.kernels.judging.test_cheats:waits", quick=True, only=only, dtype="float32")
"""


def waits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    leaves_a_process(q, k, v)
    print(torch.__version__)
    time.sleep(600)
    return q


@pytest.mark.slow
def test_no_process_is_left_by_a_judge_that_is_killed() -> None:
    import sys

    judge = subprocess.Popen([sys.executable, "-c", KILLED], cwd=Path(__file__).parents[3])
    try:
        until = time.monotonic() + 300
        while not left_behind() and time.monotonic() < until:
            time.sleep(0.05)
        assert left_behind()
        judge.kill()
        judge.wait()
        while left_behind() and time.monotonic() < until:
            time.sleep(0.05)
        assert left_behind() == []
    finally:
        judge.kill()
        judge.wait()
        for pid in left_behind():
            os.kill(pid, signal.SIGKILL)
