"""Draw a benchmark or a verification as an SVG or PNG picture, for light or dark pages. Needs the extra `plot`."""

from __future__ import annotations

from typing import get_args

from matplotlib.figure import Figure

from flashpoint.plots import style
from flashpoint.plots.errors import histograms
from flashpoint.plots.lines import QUANTITIES, quantity
from flashpoint.plots.roofline import roofline
from flashpoint.plots.style import Format
from flashpoint_contract.schemas.benchmark import BenchmarkJob
from flashpoint_contract.schemas.benchmark import PlotKind as Kind
from flashpoint_contract.schemas.benchmark import PlotTheme as Theme
from flashpoint_contract.schemas.verify import VerifyReport

KINDS: tuple[Kind, ...] = get_args(Kind)

_NEEDS = {
    "time": "ms", "tflops": "tflops_standard", "speedup": "speedup_over_naive", "memory": "peak_bytes",
    "roofline": "roofline_percent",
}  # fmt: skip


def plot_benchmark(job: BenchmarkJob, kind: Kind, format: Format = "svg", theme: Theme = "light") -> bytes:
    """Return a picture of the rows that a benchmark has so far.

    - `time`, `tflops`, `memory`: a line for each backend against sequence length; `memory` with lines for O(N), O(N²).
    - `speedup`: bars, the speed-up over the plain formula.
    - `roofline`: a point for each row, under the roofs of the measured peaks.

    Rows that differ in more than their length, such as forward and backward, have separate panels. Raises ValueError if
    no row has the figures of the picture.
    """
    return style.saved(lambda: benchmark_figure(job, kind), format, theme)


def benchmark_figure(job: BenchmarkJob, kind: Kind) -> Figure:
    """Return the figure of `plot_benchmark`. The caller must be inside `style.themed`."""
    peaks = job.environment.get("peaks", {})
    rows = [row for row in job.rows if getattr(row, _NEEDS[kind])]
    if kind == "roofline":
        rows = [row for row in rows if row.dtype in peaks]
    if kind == "speedup":
        rows = [row for row in rows if row.backend != "naive"]
    if not rows:
        beside = " (it needs the backend naive beside another one)" if kind == "speedup" else ""
        raise ValueError(f"there is nothing to plot: no row has {_NEEDS[kind]} so far{beside}")
    subtitle = job.device or rows[0].device
    kernel_name = _kernel_name(job.environment.get("kernel"))
    if kind == "roofline":
        return roofline(rows, peaks, subtitle, kernel_name)
    return quantity(QUANTITIES[kind], rows, subtitle, kernel_name)


def _kernel_name(kernel: str | None) -> str:
    """Return FUNCTION of MODULE:FUNCTION; MODULE:FUNCTION itself if a backend has the function's name."""
    function = (kernel or style.OWN).rpartition(":")[2]
    return kernel if kernel and function in style.LOOKS and function != style.OWN else function


def plot_verification(report: VerifyReport, format: Format = "svg", theme: Theme = "light") -> bytes:
    """Return a picture with a histogram of each tensor's errors by decade, and its bound."""
    return style.saved(lambda: histograms(report), format, theme)
