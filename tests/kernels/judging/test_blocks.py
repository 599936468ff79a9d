"""The judge finds a fault of the kernels for AMX that only gradients in bfloat16 with a window show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import LEVELS
from tests.support.kernels import tiles_in_c

PROGRAM = """
import flashpoint_kernels
name = "tests.support.kernels.tiles_in_c:attention"
report = flashpoint_kernels.judge(name, quick=True, dtype="bfloat16", seed=5)
print(report.verdict, *sorted({name for f in report.failures for name in f.case if name == "window"}))
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in LEVELS, reason="tiles are vectors of AVX-512")
def test_the_fault_of_a_window_in_gradients_is_found(tmp_path: Path) -> None:
    made = tiles_in_c.library(tmp_path, "backward-h-1")
    command = [sys.executable, "-c", PROGRAM]
    environment = os.environ | {"TILES": str(made), "PYTHONPATH": str(Path(__file__).parents[3])}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout == "wrong window\n", ran
