"""The kernels in C compute on torch's threads, which keep their cores busy, instead of beside them (native/teams.py).

Each test runs a program of its own, because the tests themselves run with OMP_WAIT_POLICY=passive.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashpoint_kernels import native
from tests.support.kernels.teams import answers

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="without the kernels in C"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc"),
    pytest.mark.skipif("backend: OpenMP" not in torch.__config__.parallel_info(), reason="torch has other threads"),
]


def run(program: str, **variables: str) -> list[str]:
    """Return the words that a program prints, which has all names of tests.support.kernels.teams."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    program = f"from tests.support.kernels.teams import *\n{program}"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=env | variables, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.split()


def test_calls_add_no_threads_to_those_of_torch() -> None:
    *counts, found = run("print(*(added(n) for n in (1, 2, 4, 2)), answers())")
    assert counts == ["0", "0", "0", "0"]
    assert found == answers()


@pytest.mark.slow
def test_calls_have_threads_of_their_own_where_those_of_torch_sleep() -> None:
    assert run("print(added(4))", OMP_WAIT_POLICY="PASSIVE") == ["3"]


@pytest.mark.slow
def test_calls_use_the_openmp_library_that_was_preloaded() -> None:
    """With LD_PRELOAD torch uses this library in place of the copy in its wheel."""
    found = ctypes.util.find_library("gomp")
    if found is None:
        pytest.skip("the system has no libgomp")
    assert run("print(added(3))", LD_PRELOAD=found) == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{"OMP_NUM_THREADS": "3", "OMP_STACKSIZE": "128k"}, {"OMP_THREAD_LIMIT": "2"}, {"OMP_DYNAMIC": "true"},
     {"OMP_WAIT_POLICY": "active", "OMP_PROC_BIND": "true"}],
    ids=" ".join,
)  # fmt: skip
def test_bits_do_not_depend_on_the_team(variables: dict[str, str]) -> None:
    program = "print(answers())\nfor n in (1, 2, 4, 1): torch.set_num_threads(n); call_torch(); print(answers())"
    assert {*run(program, **variables)} == {answers()}


CALLERS = """
from concurrent.futures import ThreadPoolExecutor
torch.set_num_threads(3)
expected = [answers(seed) for seed in range(4)]
call_torch()
with ThreadPoolExecutor(6) as callers:
    print(all(found == expected[n % 4] for n, found in enumerate(callers.map(answers, [0, 1, 2, 3] * 12))))
"""


@pytest.mark.slow
def test_callers_at_once_get_their_own_answers() -> None:
    assert run(CALLERS) == ["True"]


FORKED = """
import multiprocessing

def child():
    print(answers(), flush=True)

torch.set_num_threads(3)
call_torch()
if {first}:
    print(answers(), flush=True)
for _ in range(2):
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == 0, process.exitcode
    call_torch()
print(answers())
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["after a call", "before any call"])
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(first: bool) -> None:
    assert {*run(FORKED.format(first=first))} == {answers()}


@pytest.mark.slow
def test_denormal_numbers_stay_in_torchs_threads() -> None:
    program = """
torch.set_num_threads(4)
for flush in (False, True):
    torch.set_flush_denormal(flush)
    call_torch()
    print(of_denormal_numbers())
"""
    usual, flushing = run(program)
    assert usual == flushing
