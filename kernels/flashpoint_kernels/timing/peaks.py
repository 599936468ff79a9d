"""What the device could do at most, measured once: the fastest copy and the fastest square matrix product.

The roofline is drawn through these, not through the data sheet's figures, which stand beside them where they are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from flashpoint_kernels.problem import DTYPES
from flashpoint_kernels.timing.clock import Slices, clock_of
from flashpoint_kernels.timing.sheets import SHEETS

# Beyond the last-level caches, yet on a CPU short enough for a slice or two: a copy reads it and writes another.
COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
# A product is large enough when it takes this long: launches and its n² numbers no longer show beside its n³ work.
PRODUCT_MS = 10.0
REPEATS = 15  # the best of them counts: a peak is what nothing disturbs


class Peak(NamedTuple):
    """The most that a device does in one dtype; the `sheet_` figures are None where it is in no table of ours."""

    tflops: float  # of float32 where that is faster: a half type may be computed in either
    gb_per_s: float  # 1e9 bytes, those read and those written
    sheet_tflops: float | None
    sheet_gb_per_s: float | None
    sheet: str | None


_copies: dict[str, float] = {}  # device: GB/s
_products: dict[tuple[str, str], float] = {}  # (device, dtype): TFLOP/s


def find_peaks(device: str, dtype: str, slices: Slices) -> Iterator[float]:
    """Measure what `peak_of(device, dtype)` needs, with a yield after each call; nothing where it is known already."""
    clock, kind = clock_of(device), torch.device(device).type
    if device not in _copies:
        source = torch.zeros(COPY_BYTES[kind], dtype=torch.int8, device=device)
        target, taken = torch.zeros_like(source), []
        for _ in range(REPEATS):
            taken += clock.time(partial(target.copy_, source), 1)
            yield slices.end()
            slices.begin()
        _copies[device] = 2 * COPY_BYTES[kind] / min(taken) / 1e6
    for name in {dtype, "float32"}:
        if (device, name) in _products:
            continue
        n, taken = 256, [0.0]
        while taken[0] < PRODUCT_MS:
            n *= 2
            matrix = torch.randn(n, n, device=device).to(DTYPES[name])
            # Not timed: the first product of a process starts the library, the first of a size loads its code.
            torch.mm(matrix, matrix)
            yield slices.end()
            slices.begin()
            taken = clock.time(partial(torch.mm, matrix, matrix), 1)
            yield slices.end()
            slices.begin()
        for _ in range(REPEATS):
            taken += clock.time(partial(torch.mm, matrix, matrix), 1)
            yield slices.end()
            slices.begin()
        _products[device, name] = 2 * n**3 / min(taken) / 1e9


def peak_of(device: str, dtype: str) -> Peak:
    """What `find_peaks` has found. Raises KeyError before."""
    tflops = max(_products[device, dtype], _products[device, "float32"])
    sheet = SHEETS.get(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None
    if sheet is None:
        return Peak(tflops, _copies[device], None, None, None)
    of_sheet = sheet.float32_tflops if dtype == "float32" else sheet.half_tflops
    return Peak(tflops, _copies[device], of_sheet, sheet.gb_per_s, sheet.source)
