"""Rehearsals of `make gpu` with few packages, a fake device, and kills at random moments.

The fake device notes the start and end of each measurement in a file. The record of `make gpu` must have every
measurement that ended, except one whose process was killed before it wrote the row.
"""

import json
import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu_day import plan, suites
from benchmarks.gpu_day.checkout import ROOT, python_path
from benchmarks.gpu_day.record import read
from tests.support import bare
from tests.support.gpu_stand_in import StandIn
from tests.support.servers import wait_for

pytestmark = pytest.mark.slow
ABSENT = ("pydantic", "httpx", "fastapi", "hypothesis", "ml_dtypes", "psutil", "flashpoint")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has only the packages of a bare GPU machine."""
    return bare.make(tmp_path_factory.mktemp("bare"))


class Rehearsal:
    """Runs of `make gpu` on the fake device, one after another, the rows of their records, and the device's notes."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.notes = folder / "notes"
        self.outs = [folder / "out-0"]

    def start(self, *stages: str) -> subprocess.Popen[bytes]:
        """Start the command with the output folder `outs[-1]`. It resumes from the rows in `outs[-2]`, if any."""
        command = [str(self.python), "-m", "tests.support.gpu_stand_in", str(self.notes), *stages]
        command += ["--out", str(self.outs[-1]), "--cache", str(self.folder / "cache"), "--commit", "abc"]
        if len(self.outs) > 1 and (self.outs[-2] / "rows.jsonl").exists():
            command += ["--resume", str(self.outs[-2])]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLASHPOINT", "TRITON", "PYTEST"))}
        log = (self.folder / "log").open("ab")
        try:
            return subprocess.Popen(command, cwd=ROOT, env=clean, stdout=log, stderr=log)
        finally:
            log.close()

    def kill(self, process: subprocess.Popen[bytes], events: int) -> None:
        """Kill the command when there are `events` rows and notes in all, unless it has ended before."""
        try:
            wait_for(lambda: self.events >= events or process.poll() is not None, self.log)
        finally:
            process.kill()
            process.wait()

    @property
    def rows(self) -> list[dict[str, object]]:
        path = self.outs[-1] / "rows.jsonl"
        return read(path) if path.exists() else []

    @property
    def noted(self) -> list[tuple[str, str]]:
        """Return the fake device's notes: ("begin" or "end", key) for the start and the end of each measurement."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [(what, key) for what, _, key in (line.partition(" ") for line in lines)]

    @property
    def events(self) -> int:
        return len(self.rows) + len(self.noted)

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]


def test_the_bare_environment_has_no_package_more(python: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    process = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_the_tests_of_a_device_can_be_read_on_a_bare_machine(python: Path) -> None:
    files = dict.fromkeys(name for stage in plan.SUITES.values() for suite in stage for name in suites.files(suite))
    command = [python, "-m", "pytest", "--collect-only", "-q", "-p", "xdist", "-p", "no:cacheprovider", *files]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": python_path(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert "torch_backend/test_fused.py" in process.stdout


# Only `make test-full` runs this. test_gpu_run.py tests, without kills, that a run continues from earlier rows.
@pytest.mark.full
@pytest.mark.parametrize(("kills", "stages"), [(2, ("tests", "papers")), (4, ("first", "tests", "papers"))])
def test_no_measured_row_is_lost_whenever_the_command_is_killed(
    python: Path, tmp_path: Path, kills: int, stages: tuple[str, ...]
) -> None:
    """`make gpu` is killed at random moments. Every second run continues in a new folder, as on a new machine."""
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    rehearsal = Rehearsal(python, tmp_path)
    in_flight: Counter[str] = Counter()  # by key: measurements that ended before a kill, but have no row
    for number in range(kills):
        before = rehearsal.rows
        until = rehearsal.events + len(before) * bool(number % 2) + moments.randint(1, 12)
        if number % 2:
            rehearsal.outs.append(tmp_path / f"out-{number}")
        process = rehearsal.start(*stages)
        rehearsal.kill(process, until)
        rows = [json.dumps(row) for row in rehearsal.rows]
        if len(rows) >= len(before):  # otherwise the run was killed before it had copied all earlier rows
            assert [json.dumps(row) for row in before] == rows[: len(before)], f"seed {seed}"
        else:
            rehearsal.outs.pop()
        in_flight += unrecorded(rehearsal, seed) - in_flight
    process = rehearsal.start(*stages)
    assert process.wait() == 0, f"seed {seed}: {rehearsal.log()}"
    keys = Counter(row["key"] for row in rehearsal.rows)
    assert set(keys.values()) == {1}, f"seed {seed}: an existing row was measured again"
    measured = Counter(key for what, key in rehearsal.noted if what == "end")
    assert set(measured) <= set(keys)
    more = {key: count for key, count in measured.items() if count > 1 + in_flight[key]}
    assert not more, f"seed {seed}: measured again without a reason"
    environment = rehearsal.rows[-1]["environment"]
    for stage in set(stages) - {"tests"}:
        planned = {t.key for group in plan.groups(stage, StandIn.sizes, environment) for t in group.tasks}
        assert planned <= set(keys)
        report = (rehearsal.outs[-1] / "report.md").read_text()
        assert f"| {stage} | {len(planned)} | {len(planned)} | 0 |" in report
    assert {key.split()[1] for key in map(str, keys) if key.startswith("test ")} == {"hopper", "general"}


def unrecorded(rehearsal: Rehearsal, seed: int) -> Counter[str]:
    """Count measurements that ended without a row. Only the last may: a row is written before the next one begins."""
    recorded = {row["key"] for row in rehearsal.rows}
    noted = rehearsal.noted
    missing = Counter(key for what, key in noted if what == "end" and key not in recorded)
    if missing:
        assert noted[-1][1] in missing, f"seed {seed}: {missing} were measured, and others after them: {noted[-3:]}"
        assert set(missing) == {noted[-1][1]}, f"seed {seed}: {missing}"
    return missing


@pytest.mark.full
def test_the_whole_procedure_runs_on_a_bare_machine(python: Path, tmp_path: Path) -> None:
    """Run every stage in the calls of docs/gpu-day.md, each as on a new machine; the output has only a few files."""
    rehearsal = Rehearsal(python, tmp_path)
    calls = (("first",), ("tests", "judge", "races"), ("sweep",), ("table", "papers", "decode", "flex"))
    for number, stages in enumerate(calls):
        if number:
            rehearsal.outs.append(tmp_path / f"out-{number}")
        assert rehearsal.start(*stages).wait() == 0, rehearsal.log()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # a new machine has no compile cache
    stages = dict.fromkeys(row["stage"] for row in rehearsal.rows)
    assert list(stages) == list(plan.STAGES)
    names = [str(path.relative_to(rehearsal.outs[-1])) for path in rehearsal.outs[-1].rglob("*") if path.is_file()]
    assert set(names) <= {"rows.jsonl", "report.md", "timings.svg", "tests.log", "cache/part-0.tar.gz"}
    report = (rehearsal.outs[-1] / "report.md").read_text()
    assert "| not run |" not in report
