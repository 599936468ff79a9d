"""The service survives injected faults, and the checks of chaos/ detect bugs that tests/support/faulty adds."""

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from chaos.contained import can_contain
from chaos.processes import kill_engine, kill_every_http, kill_http, kill_service, restart, stop_supervisor
from chaos.run import FAULTS, Chaos
from chaos.service import Service
from tests.support.servers import wait_for

pytestmark = pytest.mark.slow

BUGS = {  # bug: the violation that must be reported; bugs that leak come late, because the leak stays
    "swap": r"wrong, another caller's answer",
    "twice": r"caches: wrong, (lengths?: |POST \S+ was answered, and not refused)",
    "hoard": r"left over: flashpoint_cache_bytes\{.* is [1-9]",
    "leak": r"left over: flashpoint_staging_slots is [1-9]",
    "lose": r": hung, ",
}
SEED = 11


@pytest.fixture
def faulty(tmp_path):
    """Yield (chaos, file). The service has the bug whose name the test writes into `file`, or none if it is empty."""
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
    chaos.quiet = 1.0  # seconds to wait for the release of resources; short, because a leaked one is never released
    for bug, wanted in BUGS.items():
        if bug == "lose":
            chaos.load.patience = 3.0  # seconds; a lost answer never comes, and a late one may count as lost here
        file.write_text(bug)
        # Callers draw random requests. If two are equal, a swap of their answers is invisible, so repeat the check.
        wait_for(
            lambda wanted=wanted: any(re.search(wanted, what) for what in chaos.look_under_load().violations),
            lambda bug=bug: f"{bug} is not seen",
        )
        file.write_text("")


def test_no_fault_costs_a_caller_more_than_the_documentation_says():
    """Each kind of fault occurs once, except those of `apart`; of these, only kill_engine and restart occur."""
    apart = (kill_engine, restart, kill_service, kill_http, kill_every_http, stop_supervisor)
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
