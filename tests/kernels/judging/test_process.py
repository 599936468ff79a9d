"""No judged function can end the judge: it reports crashes, hangs, invalid answers and odd exceptions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashpoint_kernels
from flashpoint_kernels.judging.process import Worker
from tests.judge.rude import HANGS, RUDE
from tests.judge.small import SMALL

ONE = SMALL | {"kv_len": 20, "value_dim": 16, "values": "normal", "seed": 1}


# `make test` runs one function of each kind; `make test-all` runs the others.
FIRST = (
    "segfault", "exits", "hang", "recursion", "nothing", "sparse", "other_shape", "nan", "odd_text", "prints",
    "changes_the_default_type", "crash_in_backward", "raise_in_backward", "lse_is_nan", "crash_at_some",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else pytest.mark.slow) for n in RUDE])
def test_no_function_ends_the_judge(name: str) -> None:
    verdict, code = RUDE[name]
    timeout = 2.0 if name in HANGS else 120.0
    only = SMALL if name == "crash_at_some" else ONE
    report = flashpoint_kernels.judge(
        f"tests.judge.rude:{name}", quick=True, only=only, dtype="float32", seed=0, timeout=timeout, device="cpu"
    )
    assert report.verdict == verdict, report.lines()
    assert not code or code in [cause.code for cause in report.causes], report.lines()
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdict"] == verdict
    "\n".join(report.lines()).encode()


BESIDE_JAX = """
import jax.numpy
import flashpoint_kernels

jax.numpy.zeros(1)  # starts the threads of JAX

def judged(q, k, v):
    return flashpoint_kernels.attention(q, k, v)

only = {"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 9, "kv_len": 9, "head_dim": 16, "value_dim": 16}
report = flashpoint_kernels.judge(lambda q, k, v: judged(q, k, v), quick=True, only=only, dtype="float32")
print(report.verdict)
"""


@pytest.mark.slow
def test_a_local_function_beside_jax_is_judged_without_warnings() -> None:
    """A local function is judged in a fork of this process, without JAX's warning: the child never calls JAX."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", BESIDE_JAX]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (ran.stdout, ran.stderr) == ("right\n", ""), ran


def test_a_local_function_computes_in_threads_after_this_process_has() -> None:
    """A fork lacks the threads of OpenMP that this thread has begun: the function would wait for them without end."""
    x, usual = torch.ones(1, 1, 512, 512, dtype=torch.float32, device="cpu"), torch.get_num_threads()
    torch.set_num_threads(2)
    expected = x.exp()
    torch.set_num_threads(usual)
    worker = Worker(lambda q, k, v: q.exp(), "cpu")
    try:
        worker.start()
        request = {"args": [{"tensor": name} for name in "qkv"], "kwargs": {}, "leaves": [], "num_threads": 2}
        worker.ask(request, dict.fromkeys("qkv", x))
        facts, answers = worker.answer(20.0)
    finally:
        worker.close()
    assert torch.equal(answers["o"], expected), facts


MEMORY = """
import gc, re
import flashpoint_kernels
from pathlib import Path

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

flashpoint_kernels.judge("tests.judge.right:formula_in_float32", quick=True, dtype="float32", only={"kv_len": 9})
before = resident()
flashpoint_kernels.judge("tests.judge.right:formula_in_float32", quick=True, seed=0)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read in /proc")
def test_a_judgement_gives_its_memory_back() -> None:
    """Only the exact answers stay, in a cache of 192 MiB."""
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) < 1 << 29, ran.stdout
