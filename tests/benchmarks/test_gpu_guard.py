"""If a task crashes, hangs or loses the device in a guarded process, only the result of this task is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_day.checkout import python_path
from benchmarks.gpu_day.guard import Guard, Pool
from benchmarks.gpu_day.plan import Smoke, Timed
from flashpoint_kernels.timing.case import Case
from tests.support.gpu_stand_in import Unruly
from tests.support.servers import wait_for


def of_length(length: int) -> Timed:
    return Timed(Case(backend="sdpa_flash", batch=1, q_heads=1, q_len=length, head_dim=16))


@pytest.mark.slow
def test_a_task_that_goes_wrong_ends_its_process_alone(tmp_path: Path) -> None:
    guard = Guard(Unruly(tmp_path / "notes"))
    try:
        first = guard.ask("perform", of_length(16), 300)
        assert (first.failed, first.fresh, first.lost) == (None, True, False)
        assert 1 <= first.result["ms"] < 2
        raised = guard.ask("perform", of_length(Unruly.RAISES), 300)
        assert (raised.failed, raised.fresh, raised.lost) == ("ValueError: no tile", False, False)
        hung = guard.ask("perform", of_length(Unruly.HANGS), 0.2)
        assert (hung.failed, hung.fresh, hung.lost, hung.timed_out) == ("no answer within 0 s", False, True, True)
        crashed = guard.ask("perform", of_length(Unruly.CRASHES), 300)
        assert (crashed.failed, crashed.fresh, crashed.lost) == ("the process ended: SIGSEGV", True, True)
        lost = guard.ask("perform", of_length(Unruly.LOSES), 300)
        assert (lost.fresh, lost.lost, lost.timed_out) == (True, True, False)
        assert "illegal memory access" in str(lost.failed)
        after = guard.ask("perform", of_length(16), 300)
        assert (after.result, after.fresh) == (first.result, True)
    finally:
        guard.close()


@pytest.mark.full  # only `make test-full` runs this: a quicker test in test_gpu_run.py runs a command with a Pool
def test_tasks_side_by_side_have_a_process_each_where_that_is_asked(tmp_path: Path) -> None:
    pool = Pool(Unruly(tmp_path / "notes"), 2)
    lengths = (16, Unruly.CRASHES, 32)
    try:
        answers = dict(pool.ask_all("perform", [of_length(n) for n in lengths], lambda _: 300, apart=True))
        assert all(answer.fresh for answer in answers.values())
        assert [answers[of_length(n)].failed for n in lengths] == [None, "the process ended: SIGSEGV", None]
        assert list(pool.ask_all("perform", [Smoke("forward")], lambda _: 0, apart=False)) == [], "no time is left"
    finally:
        pool.close()


ASKS = """
import sys
from pathlib import Path
from benchmarks.gpu_day.checkout import python_path
from benchmarks.gpu_day.guard import Guard
from tests.benchmarks.test_gpu_guard import of_length
from tests.support.gpu_stand_in import Unruly
guard = Guard(Unruly(Path(sys.argv[1])))
guard.ask("perform", of_length(16), 300)
print(guard._process.pid, flush=True)
guard.ask("perform", of_length(Unruly.HANGS), 3600)
"""


@pytest.mark.slow
def test_a_guarded_process_ends_with_the_one_that_asks(tmp_path: Path) -> None:
    """When the parent of a guarded process is killed, Linux kills the guarded process, even while it computes."""
    command = [sys.executable, "-c", ASKS, str(tmp_path / "notes")]
    asking = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": python_path()}, stdout=subprocess.PIPE)
    assert asking.stdout is not None
    with asking.stdout as pipe:
        process = int(pipe.readline())
        assert alive(process)
        asking.kill()
        asking.wait()
    wait_for(lambda: not alive(process), otherwise=lambda: f"{process} still runs")


def alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
