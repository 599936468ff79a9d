"""Find the threads of torch's operators, on which threads.c also computes (docs/decisions/threads.md)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

_FORKED = 0x40  # PF_FORKNOEXEC of Linux: the process was forked, and has not begun another program since


def parallel() -> int | None:
    """Return the address of the function that runs work on torch's threads; None if threads.c is to use its own.

    The function is GOMP_parallel of the OpenMP library that torch uses: its own copy of libgomp, the system's, or
    libiomp5. It cannot be used if torch has no OpenMP, or in a process that was forked, which has none of its parent's
    threads. If OMP_WAIT_POLICY is passive, torch's threads sleep after each operator, and threads.c has faster ones.
    """
    passive = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    if passive or _forked() or "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    # The dynamic linker found torch's function in the same order: the program and what was preloaded, then the
    # libraries that libtorch_cpu needs.
    for library in (None, *map(str, (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))):
        try:
            return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _forked() -> bool:
    try:
        flags = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[6]
    except OSError:  # not Linux: there, OpenMP libraries notice a fork
        return False
    return bool(int(flags) & _FORKED)
