"""Write sizes in units that people read, and say which length fits a limit."""

from __future__ import annotations

from collections.abc import Callable


def in_bytes(count: int) -> str:
    """Return a number of bytes, exactly and in a unit: `214748364800 bytes (200 GiB)`."""
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count} bytes ({_digits(count / 1024**power)} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]})"


def in_flops(count: float) -> str:
    """Return a number of floating-point operations in a unit: `236 TFLOP`."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    for unit in units[:-1]:
        if count < 999.5:
            return f"{_digits(count)} {unit}"
        count /= 1000
    return f"{_digits(count)} {units[-1]}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def longest(fits: Callable[[int], bool], length: int) -> str:
    """Return a sentence about the largest length below `length` for which `fits` returns True.

    If a length fits, each shorter one must fit, too.
    """
    low, high = 0, length  # the largest known to fit, and the smallest known not to
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low:
        return f"lengths of up to {low} fit"
    return "no length fits: take fewer sequences or heads, or smaller head dimensions"
