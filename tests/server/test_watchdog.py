"""A process whose work hangs is ended by the kernel, also while a thread holds Python's lock."""

import signal
import subprocess
import sys

import pytest

HANGING = """
import ctypes, threading, time
from flashpoint_server.watchdog import Watchdog
watchdog = Watchdog(0.2)
for _ in range(1000):
    with watchdog.watched():
        pass  # in time
time.sleep(0.3)  # outside: nobody watches
print("alive", flush=True)
def short():
    with watchdog.watched():
        pass
{hang}
"""
HOLDING_THE_LOCK = "with watchdog.watched(): ctypes.PyDLL(None).sleep(60)"
WHILE_OTHERS_END = """
hung = watchdog.watched()
threading.Thread(target=hung.__enter__).start()
while True:
    short()
"""


@pytest.mark.parametrize("hang", [HOLDING_THE_LOCK, WHILE_OTHERS_END])
def test_what_hangs_is_ended(hang):
    program = HANGING.replace("{hang}", hang)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("alive\n", -signal.SIGALRM), ended
