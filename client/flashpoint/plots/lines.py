"""Draw time, TFLOP/s, memory or speed-up of benchmark rows against sequence length.

There is a panel for each family: the rows that differ only in length and backend. A family with a single length has
bars, one for each backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullFormatter

from flashpoint.plots import style
from flashpoint.plots.families import Rows, families
from flashpoint_contract.schemas.benchmark import BenchmarkRow


@dataclass(frozen=True)
class Quantity:
    """A quantity that is derived from a `BenchmarkRow`, such as its time, and how to draw it."""

    title: str
    about: str
    unit: str
    of: Callable[[BenchmarkRow], float]
    draw: Callable[[Axes, Quantity, Rows], None]  # draws the rows of a family that has several lengths
    say: Callable[[float], str] = style.si
    spread: bool = False  # whether to draw bars from p20 to p80
    timed: bool = True  # whether the quantity is derived from the time; the marks of a noisy time then apply
    baseline: float | None = None


def quantity(what: Quantity, rows: Rows, subtitle: str, kernel_name: str = style.OWN) -> Figure:
    """Return a figure of `what`, with a panel for each family of rows. A family with a single length has bars."""
    by_family = families(rows)
    over_lengths = [row for family, members in by_family.items() if not family.length for row in members]
    figure, axes = style.panels(
        what.title,
        " · ".join(filter(None, (subtitle, what.about))),
        len(by_family),
        _legend(what, rows, over_lengths, kernel_name),
    )
    for ax, (family, members) in zip(axes, by_family.items(), strict=True):
        style.name(ax, str(family))
        if family.length:
            _one_length(ax, what, members, kernel_name)
        else:
            what.draw(ax, what, members)
            ax.set_ylabel(what.unit, fontsize=9)
    return figure


def _legend(what: Quantity, rows: Rows, over_lengths: Rows, kernel_name: str) -> list[Artist]:
    """Return the legend entries: backends (unless all panels name them), the line at 1, and the marks in use."""
    backends = style.ordered(row.backend for row in over_lengths)
    entries: list[Artist] = [
        Patch(label=named, **style.bar(backend)) if what.draw is _grouped else style.key(backend, named)
        for backend in backends
        for named in [style.named(backend, kernel_name)]
    ]
    if what.baseline is not None:
        entries.append(Line2D([], [], label=f"{what.baseline:g}: as fast as naive", **_baseline()))
    marks = "".join(_marks(what, row) for row in rows)
    hollow = "" if what.draw is _grouped or not over_lengths else "hollow, "
    for mark, meaning in style.MARKS.items():
        if mark in marks:
            entries.append(Line2D([], [], linestyle="none", label=f"{hollow}{mark}: {meaning}"))
    return entries


def _marks(what: Quantity, row: BenchmarkRow) -> str:
    """Return the marks to draw at the value of `what` in a row: characters of `style.MARKS`, or an empty string."""
    return row.marks if what.timed else "<" if row.peak_bytes_low else ""


def _one_length(ax: Axes, what: Quantity, rows: Rows, kernel_name: str) -> None:
    """Draw a horizontal bar for each backend, with its name, and its value at the end."""
    by_backend = {row.backend: row for row in rows}
    backends = style.ordered(by_backend)
    ends = []
    for place, backend in enumerate(backends):
        row = by_backend[backend]
        value = what.of(row)
        ax.barh(place, value, 0.7, **style.bar(backend))
        end = value
        if what.spread and row.ms_p20 is not None and row.ms_p80 is not None:
            ax.plot([row.ms_p20, row.ms_p80], [place, place], color=style.grey(), linewidth=2.4, solid_capstyle="butt")
            end = max(value, row.ms_p80)
        ends.append(end)
        ax.annotate(
            f"{_marks(what, row)}{what.say(value)}", (end, place), xytext=(5, 0),
            textcoords="offset points", fontsize=8.5, va="center",
            bbox={"facecolor": style.paper(), "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    if what.baseline is not None:
        ax.axvline(what.baseline, **_baseline())
        ends.append(what.baseline)
    ax.set_yticks(range(len(backends)), [style.named(backend, kernel_name) for backend in backends])
    for label, backend in zip(ax.get_yticklabels(), backends, strict=True):
        label.set_fontweight("bold" if style.look(backend).bold else "normal")
    ax.set_ylim(len(backends) - 0.4, -0.6)
    ax.set_xlim(0, max(ends) * 1.3)  # room for the values
    binary = what.say is _binary
    ax.xaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(max(ends) / 4))) if binary else MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: what.say(x)))
    ax.grid(False, axis="y")
    ax.grid(True, axis="x", linewidth=0.7)
    ax.set_xlabel(what.unit, fontsize=9)


def _lines(ax: Axes, what: Quantity, rows: Rows) -> None:
    """Draw a line for each backend against length."""
    style.plain_lengths(ax, (row.kv_len for row in rows))
    for backend in style.ordered(row.backend for row in rows):
        line = sorted((row for row in rows if row.backend == backend), key=lambda row: row.kv_len)
        x, y = [row.kv_len for row in line], [what.of(row) for row in line]
        ax.plot(x, y, **style.line(backend))
        marked = [(row.kv_len, what.of(row)) for row in line if _marks(what, row)]
        ax.plot([n for n, _ in marked], [value for _, value in marked], **style.hollow(backend))
        if what.spread:
            spread = [[max(0, v - (r.ms_p20 or v)) for v, r in zip(y, line, strict=True)],
                      [max(0, (r.ms_p80 or v) - v) for v, r in zip(y, line, strict=True)]]  # fmt: skip
            ax.errorbar(x, y, yerr=spread, fmt="none", ecolor=style.look(backend).colour, elinewidth=0.8, capsize=2)


def _logarithmic(ax: Axes, what: Quantity, rows: Rows) -> None:
    _lines(ax, what, rows)
    style.decades(ax, "y")
    ax.set_ylim(style.around(value for row in rows for value in (what.of(row), row.ms_p20, row.ms_p80) if value))


def _from_zero(ax: Axes, what: Quantity, rows: Rows) -> None:
    _lines(ax, what, rows)
    ax.set_ylim(0, 1.08 * max(map(what.of, rows)))


def _memory(ax: Axes, what: Quantity, rows: Rows) -> None:
    _lines(ax, what, rows)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_locator(LogLocator(base=4))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: what.say(y)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    _guides(ax, what, rows)


def _grouped(ax: Axes, what: Quantity, rows: Rows) -> None:
    """Draw a group of bars at each length. Each backend has one bar in a group."""
    backends, lengths = style.ordered(row.backend for row in rows), sorted({row.kv_len for row in rows})
    width = 0.84 / len(backends)
    for row in rows:
        x = lengths.index(row.kv_len) + (backends.index(row.backend) - (len(backends) - 1) / 2) * width
        ax.bar(x, what.of(row), width * 0.92, **style.bar(row.backend))
        if mark := _marks(what, row):
            ax.annotate(mark, (x, what.of(row)), xytext=(0, 1), textcoords="offset points", fontsize=9, ha="center")
    if what.baseline is not None:
        ax.axhline(what.baseline, **_baseline())
    ax.set_ylim(0, 1.12 * max(*map(what.of, rows), what.baseline or 0))
    every = -(-len(lengths) // 8)
    ax.set_xticks(range(0, len(lengths), every), [style.short_length(n) for n in lengths[::every]])
    ax.set_xlim(-0.6, len(lengths) - 0.4)
    ax.set_xlabel("sequence length", fontsize=9)


def _baseline() -> dict[str, Any]:
    return {"color": style.ink(), "linewidth": 1.4, "linestyle": (0, (4, 2)), "zorder": 2.6}


def _guides(ax: Axes, what: Quantity, rows: Rows) -> None:
    """Draw guide lines O(N), just below the least value at the largest length, and O(N²), just above the most."""
    lengths = sorted({row.kv_len for row in rows})
    last = [what.of(row) for row in rows if row.kv_len == lengths[-1]]
    for power, through, label in ((1, min(last) / 1.5, "O(N)"), (2, max(last) * 1.5, "O(N²)")):
        y = [through * (n / lengths[-1]) ** power for n in lengths]
        ax.plot(lengths, y, color=style.grey(), linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        ax.annotate(
            label, (lengths[-1], y[-1]), xytext=(6, 0), textcoords="offset points", fontsize=8, color=style.grey(),
            va="center", annotation_clip=False,
        )  # fmt: skip


def _binary(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


QUANTITIES = {
    "time": Quantity(
        "Time of a call", "median, bars from p20 to p80", "milliseconds", lambda row: row.ms or 0, _logarithmic,
        spread=True,
    ),
    "tflops": Quantity(
        "Throughput", "4·B·H·Sq·Sk·D operations forward, half of it causal, 2.5 times backward", "TFLOP/s",
        lambda row: row.tflops_standard or 0, _from_zero,
    ),
    "memory": Quantity(
        "Memory of a call", "beside its inputs, at its highest, divided by the batch", "peak memory per sequence",
        lambda row: (row.peak_bytes or 0) / row.batch, _memory, _binary, timed=False,
    ),
    "speedup": Quantity(
        "Speed-up over the plain formula", "", "times as fast as naive", lambda row: row.speedup_over_naive or 0,
        _grouped, baseline=1.0,
    ),
}  # fmt: skip
