"""Draw the roofline (Williams, Waterman and Patterson, 2009): the limits of the device, and the rate of each case."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from flashpoint.plots import style
from flashpoint.plots.families import Rows, families
from flashpoint_contract.schemas.benchmark import BenchmarkRow

Peaks = Mapping[str, Mapping[str, Any]]
SHARE = "% of roofline: the rate of a point over the roof above it"
OF_NAIVE = "naive writes the matrix of scores, so its roof is lower: a high % does not mean fast, compare times"
OF_OVER = "a point above the measured roof: its data stayed in caches, or others ran while the peaks were measured"
_POINTS = 6.5  # size of a marker in points
# Places of a label around its point: (right, up, distance in points). 1 is right or up, −1 is left or down.
_PLACES = ((0, 1, 5), (0, -1, 5), (1, 1, 4), (1, -1, 4), (-1, 1, 4), (-1, -1, 4), (1, 0, 6), (-1, 0, 6))
_RIGHT = ((1, 1, 3),)
_ALIGNED = {-1: "right", 0: "center", 1: "left"}
_STACKED = {-1: "top", 0: "center", 1: "bottom"}
Boxes = NDArray[np.float64]  # rows of (left, bottom, right, top) in pixels


def roofline(rows: Rows, peaks: Peaks, subtitle: str, kernel_name: str = style.OWN) -> Figure:
    """Return a figure with a panel for each family. Each row is a point; a line joins the points of a backend.

    `peaks`, by dtype: the measured `tflops` and `gb_per_s`, and those of the data sheet (`sheet_…`) if it is known.
    """
    by_family = families(rows)
    legend = [
        style.key(backend, style.named(backend, kernel_name)) for backend in style.ordered(row.backend for row in rows)
    ]
    for mark in sorted(set("".join(row.marks for row in rows))):
        legend.append(Line2D([], [], linestyle="none", label=f"hollow: {style.MARKS[mark]}"))
    if any(row.above_roof for row in rows):
        legend.append(Line2D([], [], label="ringed: above the measured roof", **_ring()))
    about = [subtitle, *_roofs(rows, peaks), "each algorithm by its own operations and bytes", SHARE]
    if any(row.backend.startswith("naive") for row in rows):
        about.append(OF_NAIVE)
    if any(row.above_roof for row in rows):
        about.append(OF_OVER)
    figure, axes = style.panels("Roofline", " · ".join(about), len(by_family), legend)
    for ax, (family, members) in zip(axes, by_family.items(), strict=True):
        _panel(ax, members, peaks[family.dtype])
        style.name(ax, str(family))
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # compute the layout now, because the labels' positions depend on it
    for ax, (family, members) in zip(axes, by_family.items(), strict=True):
        _label(ax, () if family.length else members, peaks[family.dtype])
    return figure


def _roofs(rows: Rows, peaks: Peaks) -> Iterator[str]:
    for dtype in dict.fromkeys(row.dtype for row in rows):
        peak = peaks[dtype]
        yield f"{dtype}, as measured: {style.si(peak['tflops'])} TFLOP/s, {style.si(peak['gb_per_s'])} GB/s"
        if peak.get("sheet_tflops"):
            sheet = f"{style.si(peak['sheet_tflops'])} TFLOP/s, {style.si(peak['sheet_gb_per_s'])} GB/s"
            yield f"by its data sheet (dotted): {sheet}"


def _panel(ax: Axes, rows: Rows, peak: Mapping[str, Any]) -> None:
    style.decades(ax, "x")
    style.decades(ax, "y")
    ridge = _ridge(peak)
    roofs = [(peak["tflops"], peak["gb_per_s"], "-")]
    if peak.get("sheet_tflops"):
        roofs.append((peak["sheet_tflops"], peak["sheet_gb_per_s"], ":"))
    left, right = style.around([ridge, *(row.arithmetic_intensity or 1 for row in rows)], room=2)
    ax.set_xlim(left, right)
    ax.set_ylim(style.around([*(roof[0] for roof in roofs), *(row.tflops or 1 for row in rows)]))
    for tflops, gb_per_s, line in roofs:
        x = [left, tflops * 1000 / gb_per_s, right]
        y = [gb_per_s * left / 1000, tflops, tflops]
        ax.plot(x, y, color=style.ink(), linewidth=1.4, linestyle=line, zorder=1)
    ax.plot([ridge, ridge], [0, peak["tflops"]], color=style.grey(), linewidth=0.8, linestyle="--", zorder=1)
    for backend in style.ordered(row.backend for row in rows):
        of_it = sorted((row for row in rows if row.backend == backend), key=lambda row: row.kv_len)
        at = [(row.arithmetic_intensity or 1, row.tflops or 1) for row in of_it]
        ax.plot(*zip(*at, strict=True), **style.line(backend, 0.8, _POINTS))
        for row, (intensity, tflops) in zip(of_it, at, strict=True):
            if row.marks:
                ax.plot(intensity, tflops, **style.hollow(backend, _POINTS))
            if row.above_roof:
                ax.plot(intensity, tflops, **_ring())
    ax.set_xlabel("FLOP a byte", fontsize=9)
    ax.set_ylabel("TFLOP/s", fontsize=9)


def _label(ax: Axes, rows: Rows, peak: Mapping[str, Any]) -> None:
    """Write the label of the ridge, and each row's length beside its point if there is room.

    The points at the ends of the lines are labelled first, because later labels find less room.
    """
    taken = np.concatenate([_covered(ax, line) for line in ax.lines])
    ridge, low = _ridge(peak), ax.get_ylim()[0] * 1.1
    taken = _place(ax, (ridge, low), f"ridge {style.si(ridge)}", taken, style.grey(), _RIGHT)
    for row in _ends_first(rows):
        at = row.arithmetic_intensity or 1, row.tflops or 1
        taken = _place(ax, at, style.short_length(row.kv_len), taken, style.look(row.backend).colour, _PLACES)


def _covered(ax: Axes, line: Line2D) -> Boxes:
    """Return boxes, in pixels, that together cover a line and its markers."""
    points = ax.transData.transform(np.clip(np.column_stack([line.get_xdata(), line.get_ydata()]), 1e-300, None))
    marker = line.get_marker() != "None"
    boxes = [_around(points, float(line.get_markersize()) * _pixels(ax))] if marker else []
    for a, b in itertools.pairwise(points) if line.get_linestyle() != "None" else ():
        steps = np.linspace(0, 1, 2 + int(min(math.dist(a, b), 5000) / 6))[:, None]
        boxes.append(_around(a + steps * (b - a), 1.0))
    return np.concatenate([np.empty((0, 4)), *boxes])


def _around(points: Boxes, size: float) -> Boxes:
    return np.concatenate([points - size / 2, points + size / 2], axis=1)


def _pixels(ax: Axes) -> float:
    """Return the number of pixels in a point (1/72 inch)."""
    return ax.figure.dpi / 72


def _ends_first(rows: Rows) -> list[BenchmarkRow]:
    """Return all rows, first those of the caller's kernel and the shortest and longest of each other backend."""
    ends = {
        backend: (min(lengths), max(lengths))
        for backend in style.ordered(row.backend for row in rows)
        if (lengths := [row.kv_len for row in rows if row.backend == backend])
    }
    return sorted(rows, key=lambda row: row.backend != style.OWN and row.kv_len not in ends[row.backend])


def _place(
    ax: Axes, at: tuple[float, float], text: str, taken: Boxes, colour: str, places: Sequence[tuple[int, int, int]]
) -> Boxes:
    """Write `text` beside the point `at`, at the first of `places` where it covers no box of `taken`, if any.

    Return `taken`, with the box of the text if it was written.
    """
    label = ax.annotate(text, at, xytext=(0, 0), textcoords="offset points", fontsize=7.5, color=colour)
    label.set_in_layout(False)
    extent, point, pixels = label.get_window_extent(), ax.transData.transform(at), _pixels(ax)
    half = np.array([extent.width, extent.height]) / 2
    for right, up, off in places:
        middle = point + np.array([right, up]) * (half + off * pixels)
        box = np.concatenate([middle - half, middle + half])
        inside = (box[:2] >= ax.bbox.min).all() and (box[2:] <= ax.bbox.max).all()
        if inside and not ((box[:2] < taken[:, 2:]) & (box[2:] > taken[:, :2])).all(axis=1).any():
            label.set(ha=_ALIGNED[right], va=_STACKED[up])
            label.xyann = (right * off, up * off)
            return np.vstack([taken, box])
    label.remove()
    return taken


def _ridge(peak: Mapping[str, Any]) -> float:
    """Return the FLOP per byte above which arithmetic, not memory, limits the device."""
    return float(peak["tflops"] * 1000 / peak["gb_per_s"])


def _ring() -> dict[str, Any]:
    return {
        "color": style.VERMILION, "marker": "o", "markersize": 11, "markerfacecolor": "none", "linestyle": "none",
        "markeredgewidth": 1.2,
    }  # fmt: skip
