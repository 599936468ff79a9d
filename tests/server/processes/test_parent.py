"""The operating system ends a process whose work hangs, also while a thread holds Python's lock."""

import signal
import subprocess
import sys

import pytest

HANGING = """
import ctypes, signal, threading
from flashpoint_server.processes.parent import Watchdog
patient = Watchdog(600)
for _ in range(1000):
    with patient.watched():
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # outside, nothing is watched
with patient.watched():
    while signal.getitimer(signal.ITIMER_REAL)[0] > 599.98:
        pass
    with patient.watched():
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 599.99  # the end of another block gives no time
print("alive", flush=True)
watchdog = Watchdog(0.1)
def short():
    with watchdog.watched():
        pass
{hang}
"""
HOLDING_THE_LOCK = "with watchdog.watched(): ctypes.PyDLL(None).sleep(600)"
WHILE_OTHERS_END = """
hung = watchdog.watched()
threading.Thread(target=hung.__enter__).start()
while True:
    short()
"""


@pytest.mark.parametrize("hang", [HOLDING_THE_LOCK, WHILE_OTHERS_END], ids=["holding the lock", "while others end"])
def test_work_that_hangs_is_ended(hang):
    program = HANGING.replace("{hang}", hang)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.stdout, ended.returncode) == ("alive\n", -signal.SIGALRM), ended
