"""Process setup: garbage collection, priority, descriptor limit, and ending with the parent process."""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys

CANNOT_WORK = 78  # EX_CONFIG: exit code of a process that a restart cannot help

NICENESS = 5  # at this niceness the kernel's scheduler gives a process a third of the default weight

_PR_SET_PDEATHSIG = 1


def keep_what_is_there() -> None:
    """Exempt all present objects from garbage collection. Called before the process serves.

    Otherwise the collector scans some hundred thousand objects of the libraries again and again, which takes a third of
    the time that an HTTP process spends on a small call.
    """
    gc.freeze()


def let_others_first() -> None:
    """Lower the priority of this engine process, for all present and later threads.

    Without this, a thread that computes for long gets as large a share of the cores as the HTTP process. With four such
    threads on two cores, and ten times as many calls as they can compute, calls were answered or refused too late.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + NICENESS, 19))


def raise_descriptor_limit() -> None:
    """Raise the descriptor limit to its maximum. A segment of shared memory takes one or two, a connection one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, the process id `parent`, ends in any way.

    Call this first: it also exits if the parent has already ended. The process ignores SIGINT and SIGHUP, which a
    terminal sends to the whole process group: they are for the parent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the parent has already ended
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
