"""The service under faults, and that the checks of chaos/ see the bugs that they are there to see."""

import re
import signal

import numpy as np
import pytest

from chaos.contained import can_contain
from chaos.processes import kill_engine, kill_http, kill_service, restart, stop_supervisor
from chaos.run import FAULTS, Chaos
from chaos.service import Service
from tests.support.servers import wait_for

pytestmark = pytest.mark.slow

BUGS = {  # in this order: what has leaked, or is lost, stays held
    "swap": r"wrong, another caller's answer",
    "twice": r"caches: wrong, (lengths?: |POST \S+ was answered, and not refused)",
    "hoard": r"left over: flashpoint_cache_bytes\{.* is [1-9]",
    "leak": r"left over: flashpoint_staging_slots is [1-9]",
    "lose": r": hung, ",
}
SEED = 11


@pytest.fixture
def faulty(tmp_path):
    """A service that has the bug that the file names; without one the checks find nothing."""
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
    chaos.quiet = 1.0  # seconds; what has leaked stays, so that a longer look sees no more
    for bug, wanted in BUGS.items():
        if bug == "lose":
            chaos.load.patience = 3.0  # a lost answer never comes; another that is late counts as lost, too
        file.write_text(bug)
        # Callers draw their questions: with two equal ones in turn, a swap shows only in a later look.
        wait_for(
            lambda wanted=wanted: any(re.search(wanted, what) for what in chaos.look_under_load().violations),
            lambda bug=bug: f"{bug} is not seen",
        )
        file.write_text("")


def test_no_fault_costs_a_caller_more_than_the_documentation_says():
    """Each kind of fault once, except those that need several HTTP processes; two starts of an engine."""
    apart = (kill_engine, restart, kill_service, kill_http, stop_supervisor)
    light = [fault for fault in FAULTS if fault not in apart]
    order = np.random.default_rng(SEED).permutation(len(light))
    half = len(light) // 2
    chaos = Chaos(Service(1, contained=can_contain()), SEED)
    try:
        for faults in ([*(light[n] for n in order[:half]), kill_engine], [restart, *(light[n] for n in order[half:])]):
            found = chaos.round(faults)
            assert not found.violations, (found.faults, found.violations)
            assert len(found.faults) > half // 2, found.faults
    finally:
        code = chaos.stop()
    assert code == 0
