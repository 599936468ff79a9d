"""Without a GPU, the tests for GPUs prepare their launches with the tile tables of a GPU, but launch no kernel.

They run with the plugin tests/support/kernels/resolved.py. A test whose shapes fit only the interpreter's tiles fails
here, and not first on a GPU.
"""

import os
import subprocess
import sys

import pytest

from benchmarks.gpu_day import plan, suites
from benchmarks.gpu_day.checkout import ROOT

# This file is left out: it launches its kernel without a `Call`, with tiles that are not in the tables.
OWN_TILES = "tests/kernels/test_nano.py"
# This test is left out: here the backend `tiled` answers, and reads keys of blocks that the test expects to be skipped.
NOT_HERE = "tests/kernels/test_block_masks.py::test_a_block_that_is_skipped_is_not_read[triton]"


# The tests that assert which kernels run.
_FIRST = (
    "test_triton_hopper.py", "test_triton_packed.py",
    *(f"triton_backend/host/test_{name}.py" for name in ("launch", "route", "sharing")),
)  # fmt: skip
QUICK = plan.Suite("quick", _FIRST, {"FLASHPOINT_HOPPER": "1"})
HOPPER, GENERAL, SERVING, _ = plan.SUITES["tests"]


@pytest.mark.parametrize(
    ("arch", "suite"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((90, QUICK), (100, GENERAL), (90, SERVING))),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((90, HOPPER), (90, GENERAL), (80, GENERAL), (80, SERVING), (100, SERVING))
        ),
    ],
    ids=lambda each: each.name if isinstance(each, plan.Suite) else None,
)
def test_every_launch_of_the_devices_tests_is_resolved(arch: int, suite: plan.Suite) -> None:
    files = [name for name in suites.files(suite) if name != OWN_TILES]
    if suite.environment["FLASHPOINT_HOPPER"] == "1":
        files += suites.files(plan.SUITES["races"][0])
    select = ["-k", suite.select] if suite.select else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.kernels.resolved", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTEST", "FLASHPOINT"))}
    env |= suite.environment | {"FLASHPOINT_TEST_ARCH": str(arch)}
    run = subprocess.run(
        [*command, "-m", "not full", "-p", "no:randomly", "--deselect", NOT_HERE, *select, *files],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert "attention_forward" in run.stdout.split("resolved: ")[1]
