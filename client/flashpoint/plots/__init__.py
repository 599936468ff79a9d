"""Pictures of what was measured, as SVG or PNG: pure functions of a benchmark or of a verification.

Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from typing import get_args

from flashpoint.benchmark_schema import BenchmarkJob
from flashpoint.benchmark_schema import PlotKind as Kind
from flashpoint.plots import lines, style
from flashpoint.plots.errors import histograms
from flashpoint.plots.roofline import roofline
from flashpoint.plots.style import Format
from flashpoint.verify_schema import VerifyReport

KINDS: tuple[Kind, ...] = get_args(Kind)

_NEEDS = {
    "time": "ms", "tflops": "tflops_standard", "speedup": "speedup_over_naive", "memory": "peak_bytes",
    "roofline": "roofline_percent",
}  # fmt: skip


def plot_benchmark(job: BenchmarkJob, kind: Kind, format: Format = "svg") -> bytes:
    """A picture of the rows that a benchmark has so far.

    `time`, `tflops` and `memory` (with guides of O(N) and O(N²)) against sequence length by backend; `speedup` over
    the plain formula as bars; `roofline` through the peaks that were measured. Raises ValueError where no row has what
    the picture shows.
    """
    peaks = job.environment.get("peaks", {})
    rows = [row for row in job.rows if getattr(row, _NEEDS[kind])]
    if kind == "roofline":
        rows = [row for row in rows if row.dtype in peaks]
    if kind == "speedup":
        rows = [row for row in rows if row.backend != "naive"]
    if not rows:
        raise ValueError(f"there is nothing to plot yet: no row has {_NEEDS[kind]}")
    subtitle = job.device or rows[0].device
    if kind == "roofline":
        return style.saved(lambda: roofline(rows, peaks, subtitle), format)
    draw = {"time": lines.time, "tflops": lines.tflops, "speedup": lines.speedup, "memory": lines.memory}[kind]
    return style.saved(lambda: draw(rows, subtitle), format)


def plot_verification(report: VerifyReport, format: Format = "svg") -> bytes:
    """The errors of each tensor by decade, and its bound."""
    return style.saved(lambda: histograms(report), format)
