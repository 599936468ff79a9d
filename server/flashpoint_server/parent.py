"""A child's tie to the process that started it."""

import ctypes
import os
import signal
import sys

CANNOT_WORK = 78  # EX_CONFIG: the exit code that says that starting again will not help

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when `parent`, a pid, ends, however that happens; ^C is the parent's to hear.

    To be called first: a parent that has ended by then is noticed, too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it is gone already
    signal.signal(signal.SIGINT, signal.SIG_IGN)
