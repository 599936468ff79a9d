"""A type checker infers the types of results from the types of the inputs and from the keywords."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_results_have_the_types_of_their_inputs():
    command = [sys.executable, "-m", "mypy", "--strict", "tests/client/typed_calls.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
