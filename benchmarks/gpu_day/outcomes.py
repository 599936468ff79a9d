"""A pytest plugin for the tests on a device: it appends the outcome of each test to the record when the test ends.

It skips tests whose outcomes the record already has. If a test hangs, or the device does not work in its process after
the test, only that process ends: pytest-xdist reports the test and starts another process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.record import Record
from benchmarks.record import now
from flashpoint_kernels.timing.device import is_lost

FRAME = "FLASHPOINT_GPU_FRAME"  # path of a JSON file: record, common fields of rows, known tests, device, time limit
_MESSAGE = 600  # largest number of characters of a failure message


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
