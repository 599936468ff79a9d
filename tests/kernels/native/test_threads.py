"""Calls of several threads at once run once each, without data races, also in forked children (threads.c)."""

import os
import subprocess
from pathlib import Path

import pytest

from flashpoint_kernels.native import build


@pytest.mark.slow
def test_several_callers_and_forks_have_no_data_race(tmp_path: Path) -> None:
    made, sources = tmp_path / "threads", [build.HERE / "threads.c", Path(__file__).parent / "threads_main.c"]
    command = ["gcc", "-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-DSOURCES=1u", "-pthread", "-Wno-tsan"]
    subprocess.run([*command, *map(str, sources), "-o", str(made)], check=True, capture_output=True)
    ran = subprocess.run(
        [made], env=os.environ | {"TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1"}, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr[-4000:]
