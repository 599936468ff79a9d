"""Describe the device of a measurement: its name, versions, data sheet and measured peaks.

The roofline uses peaks that are measured once in each process: the fastest copy and the fastest square matrix product.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from flashpoint_kernels.dispatching.machine import cpu_name, version_of
from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_kernels.timing.clock import Slices, clock_of


def device_name(device: str) -> str:
    """Return the hardware's name, for example "NVIDIA H100 80GB HBM3", or the CPU's model."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else cpu_name()


def is_lost(device: str) -> bool:
    """Return whether a GPU does not work any more in this process, for example after an illegal access."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def describe(device: str) -> dict[str, Any]:
    """Return device, cores or multiprocessors, and versions as plain data."""
    about: dict[str, Any] = {"device": device_name(device), "kind": torch.device(device).type}
    if about["kind"] == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    else:
        about |= {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
    return about | {
        "flashpoint": version_of("flashpoint"), "torch": torch.__version__, "triton": version_of("triton"),
        "python": platform.python_version(),
    }  # fmt: skip


class Sheet(NamedTuple):
    """The peaks in a GPU's data sheet.

    `half_tflops` is for dense 16-bit matrix products with float32 sums, `float32_tflops` for float32 products without
    TF32.
    """

    half_tflops: float
    float32_tflops: float
    gb_per_s: float
    source: str


# Keys are names as CUDA reports them.
SHEETS = {
    "NVIDIA A100-SXM4-80GB": Sheet(312, 19.5, 2039, "NVIDIA A100 data sheet"),
    "NVIDIA A100 80GB PCIe": Sheet(312, 19.5, 1935, "NVIDIA A100 data sheet"),
    "NVIDIA A100-SXM4-40GB": Sheet(312, 19.5, 1555, "NVIDIA A100 data sheet"),
    "NVIDIA A100-PCIE-40GB": Sheet(312, 19.5, 1555, "NVIDIA A100 data sheet"),
    "NVIDIA H100 80GB HBM3": Sheet(989.5, 67, 3350, "NVIDIA H100 data sheet, SXM; half of its figure with sparsity"),
    "NVIDIA H100 PCIe": Sheet(756.5, 51, 2000, "NVIDIA H100 data sheet, PCIe; half of its figure with sparsity"),
    "NVIDIA H200": Sheet(989.5, 67, 4800, "NVIDIA H200 data sheet, SXM; half of its figure with sparsity"),
    "NVIDIA L40S": Sheet(362.05, 91.6, 864, "NVIDIA L40S data sheet"),
    "NVIDIA GeForce RTX 4090": Sheet(165.2, 82.6, 1008, "NVIDIA Ada GPU Architecture white paper"),
    "NVIDIA RTX 4000 Ada Generation": Sheet(
        106.9, 26.7, 360, "NVIDIA RTX 4000 Ada Generation data sheet; a quarter of its figure for FP8 with sparsity"
    ),
    "NVIDIA GeForce RTX 3050": Sheet(
        18.2, 9.1, 224, "NVIDIA's specifications, 2560 cores at 1.78 GHz, with the GA102 white paper's rate a core"
    ),
    "NVIDIA B200": Sheet(
        2250, 75, 8000, "NVIDIA HGX B200 data sheet; an eighth of it, half of its figure with sparsity"
    ),
}


# Size of the copy: larger than the last-level caches, but on a CPU short enough for one or two slices.
COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
# Milliseconds: a product (n, n)·(n, n) is large enough if it takes this long. The launch, and work proportional to n²,
# are then negligible beside n³.
PRODUCT_MS = 10.0
REPEATS = 15  # the fastest repetition counts, because a peak is an undisturbed speed


class Peak(NamedTuple):
    """The maximum speed of a device in one dtype. The `sheet_` figures are None without a data sheet in SHEETS."""

    tflops: float  # of products in the dtype, or in float32 if that is faster: 16-bit types may be computed in float32
    gb_per_s: float  # 1e9 bytes a second of a copy; each byte counts twice: it is read and written
    sheet_tflops: float | None
    sheet_gb_per_s: float | None
    sheet: str | None


_copies: dict[str, float] = {}  # device: GB/s
_products: dict[tuple[str, str], float] = {}  # (device, dtype): TFLOP/s


def find_peaks(device: str, dtype: str, slices: Slices) -> Iterator[float]:
    """Measure the peaks that `peak_of(device, dtype)` returns, unless they are known.

    Yield the milliseconds of a slice after each copy and each product.
    """
    clock, kind = clock_of(device), torch.device(device).type
    if device not in _copies:
        source = torch.zeros(COPY_BYTES[kind], dtype=torch.int8, device=device)
        target, taken = torch.zeros_like(source), []
        for _ in range(REPEATS):
            taken += clock.time(partial(target.copy_, source), 1)
            yield from slices.pause()
        _copies[device] = 2 * COPY_BYTES[kind] / min(taken) / 1e6
    for name in {dtype, "float32"}:
        if (device, name) in _products:
            continue
        n, taken = 256, [0.0]
        while taken[0] < PRODUCT_MS:
            n *= 2
            matrix = torch.randn(n, n, dtype=torch.float32, device=device).to(DTYPES[name])
            # Not timed: the first product of a process initialises the library, and the first of a size loads its code.
            torch.mm(matrix, matrix)
            yield from slices.pause()
            taken = clock.time(partial(torch.mm, matrix, matrix), 1)
            yield from slices.pause()
        for _ in range(REPEATS):
            taken += clock.time(partial(torch.mm, matrix, matrix), 1)
            yield from slices.pause()
        _products[device, name] = 2 * n**3 / min(taken) / 1e9


def peak_of(device: str, dtype: str) -> Peak:
    """Return the peaks that `find_peaks` has measured. Raises KeyError if it has not run for this device and dtype."""
    tflops = max(_products[device, dtype], _products[device, "float32"])
    sheet = SHEETS.get(torch.cuda.get_device_name(device)) if torch.device(device).type == "cuda" else None
    if sheet is None:
        return Peak(tflops, _copies[device], None, None, None)
    of_sheet = sheet.float32_tflops if dtype == "float32" else sheet.half_tflops
    return Peak(tflops, _copies[device], of_sheet, sheet.gb_per_s, sheet.source)
