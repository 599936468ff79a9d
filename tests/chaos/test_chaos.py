"""The service under faults; and first, that who looks would see."""

import re
import signal

import numpy as np
import pytest

from tests.chaos.contained import can_contain
from tests.chaos.processes import kill_engine, kill_http, kill_service, restart, stop_supervisor
from tests.chaos.run import FAULTS, Chaos
from tests.chaos.service import Service

BUGS = {  # in this order: what has leaked, or is lost, stays held
    "swap": r"wrong, another caller's answer",
    "leak": r"left over: flashpoint_staging_slots is [1-9]",
    "lose": r": hung, ",
}
SEED = 11


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A service with bugs on demand, in which nothing is found without one, and the file that says which."""
    file = tmp_path_factory.mktemp("chaos") / "bug"
    file.write_text("")
    program = ("-m", "tests.support.faulty.server")
    chaos = Chaos(Service(1, contained=False, program=program, environment={"FLASHPOINT_TEST_BUG": str(file)}), SEED)
    yield chaos, file
    chaos.load.stop()
    chaos.service.terminate(signal.SIGKILL)


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_seen(faulty, bug):
    chaos, file = faulty
    chaos.quiet = 1.0  # seconds: what is left over stays
    if bug == "lose":
        chaos.load.patience = 3.0
    file.write_text(bug)
    try:
        found = chaos.look_under_load()
    finally:
        file.write_text("")
    assert any(re.search(BUGS[bug], what) for what in found.violations), found.violations


def test_no_fault_costs_a_caller_more_than_the_documentation_says():
    """Every kind of fault once, but for those that need several HTTP processes; two starts of an engine."""
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
