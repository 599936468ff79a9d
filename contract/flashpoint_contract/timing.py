"""Decide whether a measured time is too noisy to be useful."""

from __future__ import annotations

NOISY = 0.2  # (p80 − p20) / median, above which a time is noisy


def is_noisy(ms: float | None, ms_p20: float | None, ms_p80: float | None) -> bool:
    """Return whether the times of the calls differ so much that the median says little."""
    return bool(ms) and ms_p20 is not None and ms_p80 is not None and (ms_p80 - ms_p20) / (ms or 1.0) > NOISY
