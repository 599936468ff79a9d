"""The roofline (Williams, Waterman and Patterson, 2009): what the device can do at most, how near each case is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashpoint.benchmark_schema import BenchmarkRow
from flashpoint.plots import style


def roofline(rows: Sequence[BenchmarkRow], peaks: Mapping[str, Mapping[str, Any]], subtitle: str) -> Figure:
    """A panel a dtype. `peaks`, by dtype: `tflops` and `gb_per_s` as measured, `sheet_…` where a data sheet says."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    legend = [_mark(backend, True, label=backend) for backend in style.ordered(row.backend for row in rows)]
    if len({row.direction == "forward" for row in rows}) > 1:
        legend += [_mark("", True, label="filled: forward"), _mark("", False, label="hollow: with the backward")]
    figure, axes = style.panels(
        "Roofline", f"{subtitle} · each algorithm by its own count of operations", len(dtypes), legend
    )
    for ax, dtype in zip(axes, dtypes, strict=True):
        _panel(ax, [row for row in rows if row.dtype == dtype], peaks[dtype])
        style.name(ax, dtype)
    return figure


def _panel(ax: Axes, rows: Sequence[BenchmarkRow], peak: Mapping[str, Any]) -> None:
    style.decades(ax, "x")
    style.decades(ax, "y")
    ridge = peak["tflops"] * 1000 / peak["gb_per_s"]  # FLOP/byte
    intensities = [row.arithmetic_intensity or 1 for row in rows]
    left, right = min(*intensities, ridge) / 2, max(*intensities, ridge) * 3
    _roof(ax, peak["tflops"], peak["gb_per_s"], left, right, "-", "measured")
    if peak.get("sheet_tflops"):
        _roof(ax, peak["sheet_tflops"], peak["sheet_gb_per_s"], left, right, ":", "data sheet")
    ax.plot([ridge, ridge], [0, peak["tflops"]], color=style.GREY, linewidth=0.8, linestyle="--", zorder=1)
    reached = [row.tflops or 1 for row in rows]
    lowest = min(reached)
    ax.set_ylim(lowest / 2, max(*reached, peak["tflops"], peak.get("sheet_tflops") or 0) * 2.2)
    ax.annotate(
        f"ridge {style.si(ridge)}", (ridge, lowest / 2), xytext=(3, 4), textcoords="offset points", fontsize=8,
        color=style.GREY,
    )  # fmt: skip
    for row in rows:
        ax.plot(row.arithmetic_intensity, row.tflops, **_style(row.backend, row.direction == "forward"))  # type: ignore[arg-type]
    ax.set_xlabel("FLOP a byte", fontsize=9, color=style.INK)
    ax.set_ylabel("TFLOP/s", fontsize=9, color=style.INK)


def _roof(ax: Axes, tflops: float, gb_per_s: float, left: float, right: float, line: str, what: str) -> None:
    ridge = tflops * 1000 / gb_per_s
    x = [min(left, ridge), ridge, max(right, ridge)]
    ax.plot(x, [gb_per_s * x[0] / 1000, tflops, tflops], color=style.INK, linewidth=1.4, linestyle=line, zorder=1)
    ax.annotate(
        f"{what}: {style.si(tflops)} TFLOP/s, {style.si(gb_per_s)} GB/s", (x[2], tflops), xytext=(0, 3),
        textcoords="offset points", fontsize=8, color=style.GREY, ha="right",
    )  # fmt: skip


def _style(backend: str, filled: bool) -> dict[str, Any]:
    look = style.look(backend) if backend else style.Look(style.GREY, "o")
    return {
        "color": look.colour, "marker": look.marker, "linestyle": "none", "markersize": 6.5, "markeredgewidth": 1.2,
        "markerfacecolor": look.colour if filled else "white", "alpha": 0.9,
    }  # fmt: skip


def _mark(backend: str, filled: bool, label: str) -> Line2D:
    return Line2D([], [], label=label, **_style(backend, filled))
