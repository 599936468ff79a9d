"""Time, TFLOP/s and memory against sequence length, and speed-ups: a panel a family of cases, a line a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flashpoint.benchmark_schema import BenchmarkRow
from flashpoint.plots import style


class Family(NamedTuple):
    """What cases share that differ in length alone, or in a batch that makes up for it."""

    dtype: str
    head_dim: int
    value_dim: int
    q_heads: int
    kv_heads: int
    causal: bool
    direction: str

    def __str__(self) -> str:
        heads = f"H {self.q_heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.q_heads else "")
        dims = f"D {self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else "")
        return f"{self.direction}{', causal' if self.causal else ''} · {self.dtype} · {heads} · {dims}"


Rows = Sequence[BenchmarkRow]


def families(rows: Rows) -> dict[Family, list[BenchmarkRow]]:
    """The rows of each family, in the order in which they come; those of one length only where there are no others."""
    found: dict[Family, list[BenchmarkRow]] = {}
    for row in rows:
        found.setdefault(Family(*(getattr(row, field) for field in Family._fields)), []).append(row)
    lines = {family: rows for family, rows in found.items() if len({row.kv_len for row in rows}) > 1}
    return lines or found


def time(rows: Rows, subtitle: str) -> Figure:
    def draw(ax: Axes, rows: Rows) -> None:
        style.decades(ax, "y")
        ax.set_ylabel("milliseconds")
        for backend, (line, x) in _by_backend(rows):
            y = [row.ms or 0 for row in line]
            spread = [[m - (r.ms_p20 or m) for m, r in zip(y, line, strict=True)],
                      [(r.ms_p80 or m) - m for m, r in zip(y, line, strict=True)]]  # fmt: skip
            _line(ax, backend, x, y)
            ax.errorbar(x, y, yerr=spread, fmt="none", ecolor=style.look(backend).colour, elinewidth=0.8, capsize=2)

    return _panels("Time of a call", f"{subtitle} · median, bars from p20 to p80", rows, draw)


def tflops(rows: Rows, subtitle: str) -> Figure:
    def draw(ax: Axes, rows: Rows) -> None:
        ax.set_ylabel("TFLOP/s")
        for backend, (line, x) in _by_backend(rows):
            _line(ax, backend, x, [row.tflops_standard or 0 for row in line])
        ax.set_ylim(bottom=0)

    counted = "4·B·H·Sq·Sk·D operations forward, half of it causal, 2.5 times backward"
    return _panels("Throughput", f"{subtitle} · {counted}", rows, draw)


def memory(rows: Rows, subtitle: str) -> Figure:
    def draw(ax: Axes, rows: Rows) -> None:
        ax.set_yscale("log", base=2)
        ax.set_ylabel("peak memory per sequence")
        ax.yaxis.set_major_locator(LogLocator(base=4))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _binary(y)))
        ax.yaxis.set_minor_formatter(NullFormatter())
        for backend, (line, x) in _by_backend(rows):
            _line(ax, backend, x, [(row.peak_bytes or 0) / row.batch for row in line])
        _guides(ax, rows)

    return _panels("Memory of a call", f"{subtitle} · beside its inputs, at its highest", rows, draw)


def speedup(rows: Rows, subtitle: str) -> Figure:
    backends = style.ordered(row.backend for row in rows)

    def draw(ax: Axes, rows: Rows) -> None:
        lengths = sorted({row.kv_len for row in rows})
        width = 0.84 / len(backends)
        for i, backend in enumerate(backends):
            at = {row.kv_len: row.speedup_over_naive or 0 for row in rows if row.backend == backend}
            x = [lengths.index(n) + (i - (len(backends) - 1) / 2) * width for n in at]
            ax.bar(x, list(at.values()), width * 0.92, **_bar(backend))
        ax.axhline(1, color=style.INK, linewidth=1)
        ax.set_xticks(range(len(lengths)), [f"{n:g}" if n < 10_000 else f"{n / 1024:g}k" for n in lengths])
        ax.set_xlim(-0.6, len(lengths) - 0.4)
        ax.set_xlabel("sequence length", fontsize=9, color=style.INK)
        ax.set_ylabel("times as fast as naive")

    legend = [Patch(label=backend, **_bar(backend)) for backend in backends]
    return _panels("Speed-up over the plain formula", subtitle, rows, draw, legend, lengths_axis=False)


def _bar(backend: str) -> dict[str, Any]:
    look = style.look(backend)
    return {"facecolor": look.colour, "hatch": look.hatch, "edgecolor": "white"}


def _panels(
    title: str,
    subtitle: str,
    rows: Rows,
    draw: Callable[[Axes, Rows], None],
    legend: Sequence[Artist] = (),
    lengths_axis: bool = True,
) -> Figure:
    found = families(rows)
    handles: Sequence[Artist] = legend or [style.key(backend) for backend in style.ordered(row.backend for row in rows)]
    figure, axes = style.panels(title, subtitle, len(found), handles)
    for ax, (family, members) in zip(axes, found.items(), strict=True):
        style.name(ax, str(family))
        if lengths_axis:
            style.plain_lengths(ax, (row.kv_len for row in members))
            ax.set_xlabel("sequence length", fontsize=9, color=style.INK)
        draw(ax, members)
        ax.yaxis.label.set(fontsize=9, color=style.INK)
    return figure


def _by_backend(rows: Rows) -> list[tuple[str, tuple[list[BenchmarkRow], list[int]]]]:
    """Of each backend its rows by length, and the lengths."""
    found = []
    for backend in style.ordered(row.backend for row in rows):
        line = sorted((row for row in rows if row.backend == backend), key=lambda row: row.kv_len)
        found.append((backend, (line, [row.kv_len for row in line])))
    return found


def _line(ax: Axes, backend: str, x: Sequence[float], y: Sequence[float]) -> None:
    ax.plot(x, y, linewidth=1.7, markersize=5.5, markeredgecolor="white", markeredgewidth=0.6, **style.line(backend))


def _guides(ax: Axes, rows: Rows) -> None:
    """How memory grows that is linear or quadratic in the length, through the least and the most at the last one."""
    lengths = sorted({row.kv_len for row in rows})
    if len(lengths) < 2:
        return
    last = [(row.peak_bytes or 0) / row.batch for row in rows if row.kv_len == lengths[-1]]
    for power, through, label in ((1, min(last) / 1.5, "O(N)"), (2, max(last) * 1.5, "O(N²)")):
        y = [through * (n / lengths[-1]) ** power for n in lengths]
        ax.plot(lengths, y, color=style.GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        ax.annotate(
            label, (lengths[-1], y[-1]), xytext=(4, 0), textcoords="offset points", fontsize=8, color=style.GREY,
            va="center", annotation_clip=False,
        )  # fmt: skip


def _binary(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count /= 1024
    return f"{count:g} GiB"
