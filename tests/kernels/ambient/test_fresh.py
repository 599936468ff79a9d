"""A process that imports the library, and calls it first, in some state has the bits of another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def fresh(*states: str) -> Mapping[str, Any]:
    """Return the report of `fresh.py` for each state, and that of the plain one, whose name is empty."""
    command = [sys.executable, "-m", "tests.kernels.ambient.fresh", "", *states]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return {line["state"]: line | {"text": ran.stderr} for line in map(json.loads, ran.stdout.splitlines())}


def check(*states: str) -> None:
    reports = fresh(*states)
    expected = reports[""]["within"]
    for state in states:
        assert "within" in reports[state], reports[state]
        for place in ("within", "after"):
            # Inputs that are made in this state have zeros in the place of denormal numbers.
            unlike = "denormal" if state == "flush to zero" else " "
            names = [name for name in reports[state][place] if not name.endswith(unlike)]
            different = [name for name in names if reports[state][place][name] != expected[name]]
            assert not different, f"{state}, {place}: {different}"


def test_the_first_call_of_a_process_may_be_in_another_state() -> None:
    check("bfloat16 on meta")


@pytest.mark.slow
def test_the_first_call_of_a_process_may_be_in_any_state() -> None:
    check(
        "default dtype float16", "default dtype float64", 'set_default_device("cuda")', "inference_mode", "no_grad",
        "autocast, disabled", "deterministic algorithms", 'set_float32_matmul_precision("medium")', "flush to zero",
        "5 threads", "forward-mode level", "function mode", "dispatch mode",
    )  # fmt: skip
