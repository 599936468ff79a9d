"""Run the kernel tests on the device in parallel; each outcome becomes a row of the record."""

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

CUT_OFF = 124  # the exit code if time ran out


def files(suite: Suite) -> list[str]:
    """Return the files of a suite in the order of its patterns. Raises ValueError if a pattern matches no file."""
    folder = ROOT / "tests" / "kernels"
    paths = []
    for pattern in suite.patterns:
        if not (matching := sorted(folder.glob(pattern))):
            raise ValueError(f"suite {suite.name}: there is no tests/kernels/{pattern}")
        paths += matching
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys(paths)]


def run(
    suite: Suite, record: Path, row: dict[str, Any], known: list[str], device: str, processes: int, seconds: float,
    log: Path,
) -> int:  # fmt: skip
    """Run the tests of a suite that are not `known`, and return pytest's exit code, 124 after `seconds`.

    `row` has the common fields of the rows. The output is appended to `log`. pytest loads no other installed plugins,
    and warnings are not errors: the project does not pin the device's packages.
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
            environment["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")  # keeps instrumented kernels separate
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
                process.kill()  # this closes the channel of the workers of pytest-xdist, which then end
                process.wait()
                return CUT_OFF
