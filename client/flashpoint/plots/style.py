"""How every picture looks: a background of its own, colours that colour-blind eyes tell apart, a mark a backend.

Colours are Okabe and Ito's (Color Universal Design, 2008), without the yellow, which white paper swallows.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

Format = Literal["svg", "png"]
INK, GREY, RULE = "#1a1a1a", "#6b6b6b", "#dcdcdc"
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
PNG_DPI = 160  # sharp on a dense screen, and in print at half a page
_DRAWING = threading.Lock()  # matplotlib's settings are the process's


class Look(NamedTuple):
    colour: str
    marker: str
    line: str = "-"
    hatch: str = ""


# The plain formula is black, ours are solid, others' are dashed.
_LOOKS = {
    "naive": Look(BLACK, "o"),
    "naive_explicit": Look(GREY, "s", ":", "...."),
    "reference": Look(GREY, "X"),
    "triton": Look(VERMILION, "D"),
    "torch": Look(BLUE, "^"),
    "tiled": Look(GREEN, "v"),
    "sdpa_flash": Look(SKY, "P", "--", "///"),
    "sdpa_cudnn": Look(ORANGE, "h", "--", "///"),
    "sdpa_efficient": Look(PURPLE, "<", "--", "///"),
    "sdpa_math": Look(GREY, ">", "--", "///"),
    "flex": Look(ORANGE, "*", "-.", "xxx"),
    "flash_attn": Look(SKY, "p", "-.", "xxx"),
    "flash_attn_3": Look(BLUE, "d", "-.", "xxx"),
    "flashinfer": Look(GREEN, "8", "-.", "xxx"),
    "xformers": Look(PURPLE, "H", "-.", "xxx"),
}
_OTHER = Look(GREY, "+", "-.")


def look(backend: str) -> Look:
    return _LOOKS.get(backend, _OTHER)


def ordered(backends: Iterable[str]) -> list[str]:
    """Each backend once, in one order for all pictures."""
    known = list(_LOOKS)
    return sorted(set(backends), key=lambda name: (known.index(name) if name in known else len(known), name))


def panels(title: str, subtitle: str, count: int, legend: Sequence[Artist]) -> tuple[Figure, list[Axes]]:
    """A figure of `count` axes, row by row, its title above and its legend below."""
    columns = 1 if count == 1 else 2 if count in (2, 4) else 3
    rows = math.ceil(count / columns)
    width = {1: 6.4, 2: 9.6, 3: 12.0}[columns]
    legend_rows = math.ceil(len(legend) / (4 if columns < 3 else 6))
    height = 2.9 * rows + 0.75 + 0.26 * legend_rows
    rect = (0, 0.26 * legend_rows / height, 1, 1 - (0.26 * legend_rows + 0.62) / height)
    figure = Figure(figsize=(width, height), facecolor="white")
    figure.set_layout_engine("constrained", rect=rect)
    figure.text(0.012, 1 - 0.12 / height, title, ha="left", va="top", fontsize=13, fontweight="bold", color=INK)
    figure.text(0.012, 1 - 0.38 / height, subtitle, ha="left", va="top", fontsize=9, color=GREY)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for ax in axes[:count]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
        ax.tick_params(colors=INK, labelsize=8.5, which="both", length=3)
        ax.grid(True, axis="y", color=RULE, linewidth=0.7)
        ax.set_axisbelow(True)
    if legend:
        figure.legend(
            handles=list(legend), loc="lower center", ncols=4 if columns < 3 else 6, frameon=False, fontsize=9,
            labelcolor=INK,
        )  # fmt: skip
    return figure, axes[:count]


def name(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=9.5, color=INK)


def key(backend: str) -> Line2D:
    """A backend's entry in the legend."""
    return Line2D([], [], label=backend, markersize=6, **line(backend))


def line(backend: str) -> dict[str, Any]:
    style = look(backend)
    return {"color": style.colour, "marker": style.marker, "linestyle": style.line}


def plain_lengths(ax: Axes, lengths: Iterable[int]) -> None:
    """A logarithmic axis of sequence lengths, each of them named."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(set(lengths)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 10_000 else f"{x / 1024:g}k"))
    ax.xaxis.set_minor_locator(NullLocator())


def decades(ax: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis on which each 1 and 3 is named."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    ax.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(10, subs=(1, 3)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
    axis.set_minor_locator(NullLocator())


def si(value: float) -> str:
    """0.02, 3, 450: at most three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def saved(draw: Callable[[], Figure], format: Format) -> bytes:
    """The picture's bytes, the same for the same picture. Thread-safe."""
    settings: Any = {"svg.hashsalt": "flashpoint", "svg.fonttype": "none", "hatch.linewidth": 0.6}
    with _DRAWING, matplotlib.rc_context(settings):
        out = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else None
        draw().savefig(out, format=format, dpi=PNG_DPI, metadata=metadata)
        return out.getvalue()
