"""Profile all threads of each process of the server; small_call.py puts this folder into their path.

At each SIGUSR2, a process writes how often its functions were called, and their own seconds of processor time, to a new
file in PROFILE_FOLDER.
"""

import cProfile
import itertools
import json
import os
import signal
import threading
import time

FOLDER = os.environ.get("PROFILE_FOLDER")
_profiles: list[cProfile.Profile] = []
_numbers = itertools.count()
_run = threading.Thread.run


def begin() -> None:
    """Profile the thread that calls this."""
    profile = cProfile.Profile(time.thread_time)
    _profiles.append(profile)
    profile.enable()


def profiled(thread: threading.Thread) -> None:
    """Take the place of `Thread.run`."""
    begin()
    _run(thread)


def write(*_: object) -> None:
    """Write the calls and seconds of each function so far, by file, line and name.

    The main thread is profiled from the first signal on, so that the profiler does not slow the start.
    """
    if (number := next(_numbers)) == 0:
        begin()
    taken: dict[str, tuple[int, float]] = {}
    for entry in [entry for profile in list(_profiles) for entry in profile.getstats()]:
        code = entry.code
        name = code if isinstance(code, str) else f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"
        calls, seconds = taken.get(name, (0, 0.0))
        taken[name] = calls + entry.callcount, seconds + entry.inlinetime
    path = os.path.join(FOLDER, f"{os.getpid()}-{number}")
    with open(path + ".new", "w") as file:
        file.write(json.dumps(taken))  # in one call, which does not count among those of the server
    os.rename(path + ".new", path + ".json")


if FOLDER:
    signal.signal(signal.SIGUSR2, write)
    threading.Thread.run = profiled
