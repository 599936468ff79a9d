"""Freed memory in the C library's heaps. There are many heaps, one for each thread that allocates."""

from __future__ import annotations

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone


def trim() -> None:
    """Give what heaps keep back to the system: some milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)
