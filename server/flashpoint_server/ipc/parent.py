"""Requests of a process to the system and to Python: at its start, and to end with its parent or when it hangs."""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager

CANNOT_WORK = 78  # EX_CONFIG: the exit code that says that starting again will not help

NICENESS = 5  # a third of the weight that a process has else

_PR_SET_PDEATHSIG = 1


def keep_what_is_there() -> None:
    """Tell the garbage collector that what this process has made before it serves will stay.

    Else it looks through all of that, some hundred thousand objects of the libraries, again and again: a third of the
    time that an HTTP process spends on a small call.
    """
    gc.freeze()


def let_others_first() -> None:
    """Lower the priority of this process, of every thread that it has and of those to come.

    Without it a thread that computes for long gets as much of the cores as the HTTP process. On two cores with four
    such threads, at ten times the capacity, calls were refused after a second, or answered late.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + NICENESS, 19))


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the system does: a segment of shared memory takes one or two, a connection one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when `parent`, a pid, ends, however that happens.

    Call it first: it also notices a parent that has ended already. SIGINT and SIGHUP, which a terminal sends to the
    whole process group, are for the parent: this process ignores them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it is gone already
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class Watchdog:
    """SIGALRM, which nobody handles, ends the process when any `watched` block takes longer than `limit` seconds.

    The kernel sends it: a thread that hangs may hold Python's lock for ever.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._began: dict[object, float] = {}  # in order: the first is the oldest

    def watched(self) -> AbstractContextManager[None]:
        return _Watched(self)

    def begin(self, block: object) -> None:
        """Watch a block until `end`."""
        with self._lock:
            self._began[block] = time.monotonic()
            if len(self._began) == 1:
                signal.setitimer(signal.ITIMER_REAL, self._limit)

    def end(self, block: object) -> None:
        """A block has ended."""
        with self._lock:
            first = next(iter(self._began)) is block
            del self._began[block]
            if first:  # else the timer is an older block's
                oldest = next(iter(self._began.values()), None)
                left = 0.0 if oldest is None else max(oldest + self._limit - time.monotonic(), 1e-6)
                signal.setitimer(signal.ITIMER_REAL, left)


class _Watched(AbstractContextManager[None]):
    """A block that is watched. A class, for a generator takes twice as long, and each call has two of them."""

    __slots__ = ("_watchdog",)

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def __enter__(self) -> None:
        self._watchdog.begin(self)

    def __exit__(self, *_: object) -> None:
        self._watchdog.end(self)
