"""Return freed memory from the C library's heaps to the system. Each allocating thread has its own heap."""

from __future__ import annotations

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc


def trim() -> None:
    """Return the free memory of all heaps to the system. Takes some milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)
