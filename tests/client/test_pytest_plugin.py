"""A test with the fixture `judge_attention` passes for a right function and fails for a wrong one."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

TEST = """
from my_kernels import constant, peeking, plain

def test_plain(judge_attention):
    judge_attention(plain, {"q_len": 20, "head_dim": 16}, dtype="float32")

def test_peeking(judge_attention):
    judge_attention(peeking, {"q_len": 20, "head_dim": 16}, causal=True, direction="forward")

def test_constant(judge_attention):
    judge_attention(constant, {"q_len": 20, "head_dim": 16})
"""


@pytest.mark.slow
def test_the_fixture_fails_a_test_with_what_is_wrong(kernels):
    (kernels / "test_mine.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-p", "no:schemathesis", "-p", "no:flashpoint", "-p", "flashpoint.pytest_plugin", "test_mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kernels, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
    assert "the causal mask is shifted by one: a query sees one key too many" in done.stdout
    assert "no case could be judged" in done.stdout
