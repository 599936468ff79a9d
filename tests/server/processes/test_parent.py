"""`Watchdog` lets the operating system end a process whose work hangs, even while a thread holds Python's GIL.

All processes of a killed server end.
"""

import contextlib
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.servers import wait_for

HANGING = """
import ctypes, signal, threading
from flashpoint_server.engine.execution.executor import Watchdog
patient = Watchdog(600)
for _ in range(1000):
    with patient:
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # outside, nothing is watched
def pass_through():
    with patient:
        pass
with patient:
    while signal.getitimer(signal.ITIMER_REAL)[0] > 599.98:
        pass
    other = threading.Thread(target=pass_through)
    other.start()
    other.join()
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 599.99  # the end of another thread's work gives no time
print("alive", flush=True)
watchdog = Watchdog(0.1)
def short():
    with watchdog:
        pass
{hang}
"""


HOLDING_THE_LOCK = "with watchdog: ctypes.PyDLL(None).sleep(600)"


WHILE_OTHERS_END = """
threading.Thread(target=lambda: watchdog.__enter__() or signal.pause()).start()
while True:
    short()
"""


@pytest.mark.parametrize("hang", [HOLDING_THE_LOCK, WHILE_OTHERS_END], ids=["holding the lock", "while others end"])
def test_work_that_hangs_is_ended(hang):
    program = HANGING.replace("{hang}", hang)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.stdout, ended.returncode) == ("alive\n", -signal.SIGALRM), ended


@pytest.mark.slow
@pytest.mark.parametrize("ready", [False, True], ids=["starting", "ready"])
def test_a_killed_server_leaves_no_process(start_server, ready):
    server = start_server(ready=ready)
    wait_for(lambda: server.children("engine.process"), lambda: "no engine")
    family = [p.pid for p in psutil.Process(server.pid).children(recursive=True)]
    server.process.kill()
    assert server.wait_exit() == -signal.SIGKILL
    wait_for(lambda: not any(map(_alive, family)), lambda: f"left behind: {family}")


def _alive(pid):
    """Return whether process `pid` runs. A zombie, which waits to be reaped, does not run."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
