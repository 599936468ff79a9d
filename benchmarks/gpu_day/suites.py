"""Run the kernel tests on the device in parallel; each outcome becomes a row of the record when the test ends.

The processes of the tests load this module as a plugin of pytest. It skips tests whose outcomes the record already has.
If a test hangs, or the device does not work in its process after the test, only that process ends: pytest-xdist reports
the test and starts another process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.checkout import ROOT
from benchmarks.gpu_day.guard import die_with_parent
from benchmarks.gpu_day.plan import Suite
from benchmarks.gpu_day.record import Record
from benchmarks.record import now

CUT_OFF = 124  # the exit code if time ran out
# This variable has the path of a JSON file: the record's path, common fields of rows, known tests, device, time limit.
FRAME = "FLASHPOINT_GPU_FRAME"
_MESSAGE = 600  # largest number of characters of a failure message


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
    """Run the tests of a suite that are not `known`; return pytest's exit code, or CUT_OFF if `seconds` are over.

    `row` has the common fields of the rows. The output is appended to `log`. pytest loads no other installed plugins,
    and warnings are not errors: the project does not pin the device's packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        frame = {"record": str(record), "suite": suite.name, "row": row, "known": known, "device": device}
        path = Path(folder) / "frame.json"
        path.write_text(json.dumps(frame | {"limit": suite.seconds}))
        variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1", FRAME: str(path)}
        environment = {**os.environ, **suite.environment, **variables}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        if "TRITON_INSTRUMENTATION_MODE" in suite.environment:
            environment["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")  # keeps instrumented kernels separate
        plugins = ["-p", "xdist", "-p", "benchmarks.gpu_day.suites", "-p", "no:cacheprovider"]
        options = ["-n", str(processes), "-m", "not full", "-o", "filterwarnings=default", "-ra", "--tb=short", "-q"]
        options += ["-k", suite.select] if suite.select else []
        command = [sys.executable, "-P", "-m", "pytest", *plugins, *options, *files(suite)]
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


class Outcomes:
    def __init__(self, frame: dict[str, Any], controls: bool) -> None:
        self.frame = frame
        self.known = set(frame["known"])
        self.record = Record(Path(frame["record"])) if controls else None
        self.seen: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if item.nodeid in self.known]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in self.known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        """End the process if its test exceeds the time limit: faulthandler prints the stack and exits."""
        faulthandler.dump_traceback_later(self.frame["limit"], exit=True, file=sys.__stderr__ or 2)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[Any]:
        from flashpoint_kernels.timing.device import is_lost  # this imports torch

        report = yield
        if call.excinfo is not None and is_lost(self.frame["device"]):
            print(call.excinfo.getrepr(), flush=True)
            os._exit(1)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the worst outcome of a test's phases after the last phase, in the process that writes the record."""
        if self.record is None:
            return
        outcome = self.seen.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        outcome["seconds"] += getattr(report, "duration", 0.0)
        if report.outcome != "passed" and outcome["outcome"] != "failed":
            outcome |= {"outcome": report.outcome, "message": _message(report)}
        if report.when in ("teardown", "???"):  # "???": the process of the test died
            del self.seen[report.nodeid]
            self._write(report.nodeid, outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a test file that cannot be collected as a failed test."""
        if self.record is not None and report.failed and report.nodeid not in self.known:
            self._write(report.nodeid, {"outcome": "failed", "seconds": 0.0, "message": _message(report)})

    def _write(self, name: str, outcome: dict[str, Any]) -> None:
        assert self.record is not None
        key = f"test {self.frame['suite']} {name}"
        taken = outcome.pop("seconds")
        self.record.append({"key": key, "at": now(), "seconds": taken, **self.frame["row"], "result": outcome})


def pytest_configure(config: pytest.Config) -> None:
    frame = json.loads(Path(os.environ[FRAME]).read_text())
    config.pluginmanager.register(Outcomes(frame, controls=not hasattr(config, "workerinput")))


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):  # longrepr of a skipped test is (file, line, reason)
        return str(report.longrepr[-1])
    return report.longreprtext[-_MESSAGE:]
