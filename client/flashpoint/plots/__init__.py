"""Pictures of what was measured, as SVG or PNG, light or dark: pure functions of a benchmark or of a verification.

Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from typing import get_args

from matplotlib.figure import Figure

from flashpoint.benchmark_schema import BenchmarkJob
from flashpoint.benchmark_schema import PlotKind as Kind
from flashpoint.benchmark_schema import PlotTheme as Theme
from flashpoint.plots import style
from flashpoint.plots.errors import histograms
from flashpoint.plots.lines import QUANTITIES, quantity
from flashpoint.plots.roofline import roofline
from flashpoint.plots.style import Format
from flashpoint.verify_schema import VerifyReport

KINDS: tuple[Kind, ...] = get_args(Kind)

_NEEDS = {
    "time": "ms", "tflops": "tflops_standard", "speedup": "speedup_over_naive", "memory": "peak_bytes",
    "roofline": "roofline_percent",
}  # fmt: skip


def plot_benchmark(job: BenchmarkJob, kind: Kind, format: Format = "svg", theme: Theme = "light") -> bytes:
    """A picture of the rows that a benchmark has so far.

    `time`, `tflops` and `memory` (with guides of O(N) and O(N²)) against sequence length by backend; `speedup` over
    the plain formula as bars; `roofline` through the peaks that were measured. Rows that differ in more than their
    length have a panel of their own, forward and backward too. Raises ValueError where no row has what the picture
    shows.
    """
    return style.saved(lambda: benchmark_figure(job, kind), format, theme)


def benchmark_figure(job: BenchmarkJob, kind: Kind) -> Figure:
    """The figure of `plot_benchmark`, made within `style.themed`."""
    peaks = job.environment.get("peaks", {})
    rows = [row for row in job.rows if getattr(row, _NEEDS[kind])]
    if kind == "roofline":
        rows = [row for row in rows if row.dtype in peaks]
    if kind == "speedup":
        rows = [row for row in rows if row.backend != "naive"]
    if not rows:
        raise ValueError(f"there is nothing to plot yet: no row has {_NEEDS[kind]}")
    subtitle = job.device or rows[0].device
    return roofline(rows, peaks, subtitle) if kind == "roofline" else quantity(QUANTITIES[kind], rows, subtitle)


def plot_verification(report: VerifyReport, format: Format = "svg", theme: Theme = "light") -> bytes:
    """The errors of each tensor by decade, and its bound."""
    return style.saved(lambda: histograms(report), format, theme)
