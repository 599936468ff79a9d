"""The service survives faults, and the checks of chaos/ detect the seeded bugs."""

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from chaos.contained import can_contain
from chaos.processes import kill_engine, kill_http, kill_service, restart, stop_supervisor
from chaos.run import FAULTS, Chaos
from chaos.service import Service
from tests.support.servers import wait_for

pytestmark = pytest.mark.slow

BUGS = {  # leaking bugs come last: their resources are not released
    "swap": r"wrong, another caller's answer",
    "twice": r"caches: wrong, (lengths?: |POST \S+ was answered, and not refused)",
    "hoard": r"left over: flashpoint_cache_bytes\{.* is [1-9]",
    "leak": r"left over: flashpoint_staging_slots is [1-9]",
    "lose": r": hung, ",
}
SEED = 11


@pytest.fixture
def faulty(tmp_path):
    """Return a service with the bug that `file` names; if the file is empty, the checks find no violation."""
    file = tmp_path / "bug"
    file.write_text("")
    program = ("-m", "tests.support.faulty.server")
    chaos = Chaos(Service(1, contained=False, program=program, environment={"FLASHPOINT_TEST_BUG": str(file)}), SEED)
    yield chaos, file
    chaos.load.stop()
    chaos.service.terminate(signal.SIGKILL)
    chaos.service.discard()


def test_a_seeded_bug_is_seen(faulty):
    chaos, file = faulty
    chaos.quiet = 1.0  # seconds; a leak stays, so a longer check sees no more
    for bug, wanted in BUGS.items():
        if bug == "lose":
            chaos.load.patience = 3.0  # a lost answer never comes; a late answer also counts as lost
        file.write_text(bug)
        # Callers draw random requests: if two are equal, a swap of their answers shows only in a later check.
        wait_for(
            lambda wanted=wanted: any(re.search(wanted, what) for what in chaos.look_under_load().violations),
            lambda bug=bug: f"{bug} is not seen",
        )
        file.write_text("")


def test_no_fault_costs_a_caller_more_than_the_documentation_says():
    """Each kind of fault occurs once, except those that need several HTTP processes; an engine starts twice."""
    apart = (kill_engine, restart, kill_service, kill_http, stop_supervisor)
    light = [fault for fault in FAULTS if fault not in apart]
    order = np.random.default_rng(SEED).permutation(len(light))
    half = len(light) // 2
    chaos = Chaos(Service(1, contained=can_contain()), SEED)
    try:
        for faults in ([*(light[n] for n in order[:half]), kill_engine], [restart, *(light[n] for n in order[half:])]):
            report = chaos.round(faults)
            assert not report.violations, (report.faults, report.violations)
            assert len(report.faults) > half // 2, report.faults
    finally:
        code = chaos.stop()
    assert code == 0


def test_the_command_injects_a_number_of_faults(tmp_path):
    out = tmp_path / "rounds.jsonl"
    command = [sys.executable, "-m", "chaos", "--faults", "2", "--only", "leave", "--out", out]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    first, *rounds = map(json.loads, out.read_text().splitlines())
    assert first["seed"] == 0
    assert sum(len(one["faults"]) for one in rounds) == 2
