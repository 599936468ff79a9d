"""Tests of the kernels on the device: in parallel, each outcome a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_day import outcomes
from benchmarks.gpu_day.checkout import ROOT
from benchmarks.gpu_day.guard import die_with_parent
from benchmarks.gpu_day.plan import Suite

CUT_OFF = 124  # the exit code where time ran out


def files(suite: Suite) -> list[str]:
    """The files of a suite, each once, in the order of its patterns. Raises ValueError for a pattern without a file."""
    folder = ROOT / "tests" / "kernels"
    found = []
    for pattern in suite.patterns:
        if not (matching := sorted(folder.glob(pattern))):
            raise ValueError(f"suite {suite.name}: there is no tests/kernels/{pattern}")
        found += matching
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys(found)]


def run(
    suite: Suite, record: Path, row: dict[str, Any], known: list[str], device: str, processes: int, seconds: float,
    log: Path,
) -> int:  # fmt: skip
    """Run the tests of a suite that are not `known`, and return pytest's exit code, 124 after `seconds`.

    `row`: what the rows of all tests share. The output goes to the end of `log`. Plugins that happen to be installed
    are left out, and warnings are no errors: the device's packages are not those that the project pins.
    """
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.json"
        frame.write_text(
            json.dumps(
                {
                    "record": str(record), "suite": suite.name, "row": row, "known": known, "device": device,
                    "limit": suite.seconds,
                }
            )
        )  # fmt: skip
        environment = {
            **os.environ, **suite.environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1",
            outcomes.FRAME: str(frame),
        }  # fmt: skip
        if "TRITON_INSTRUMENTATION_MODE" in suite.environment:
            environment["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")  # not to be mixed up with the others
        plugins = ["-p", "xdist", "-p", "benchmarks.gpu_day.outcomes", "-p", "no:cacheprovider"]
        options = ["-n", str(processes), "-m", "not full", "-o", "filterwarnings=default", "-ra", "--tb=short", "-q"]
        options += ["-k", suite.select] if suite.select else []
        command = [sys.executable, "-m", "pytest", *plugins, *options, *files(suite)]
        with log.open("ab") as output:
            output.write(f"\n== {suite.name}\n".encode())
            output.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )  # fmt: skip
            try:
                return process.wait(max(seconds, 0))
            except subprocess.TimeoutExpired:
                process.kill()  # its workers end with it: their channel is closed
                process.wait()
                return CUT_OFF
