"""The style of all pictures: light and dark themes, and a colour, a marker and a line for each backend.

The colours can be distinguished with colour blindness: Okabe and Ito (Color Universal Design, 2008), without yellow,
which is hard to see on white. Markers, dashes and hatches differ, too, for print without colours.
"""

from __future__ import annotations

import io
import math
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from flashpoint_contract.schemas.benchmark import PlotTheme
from flashpoint_contract.timing import NOISY

Format = Literal["svg", "png"]
INK, GREY, RULE = "#1a1a1a", "#6b6b6b", "#dcdcdc"
CRIMSON = "#ad1457"  # the colour of the caller's kernel only
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
MARKS = {
    "~": f"p20 to p80 over {NOISY:.0%} of the median",
    "*": "other programs used the cores",
    "<": "below what the algorithm must hold",
}
PNG_DPI = 160  # gives sharp pictures on a high-resolution screen and in half-page prints
_DRAWING = threading.Lock()  # matplotlib's settings are global in the process
_PANEL_INCHES, _LINE_INCHES, _KEY_INCHES = 3.05, 0.19, 0.26  # heights of a panel, a line of text, a legend row


class _Colours(NamedTuple):
    paper: str
    ink: str
    grey: str
    rule: str
    blue: str
    crimson: str


_THEMES: dict[PlotTheme, _Colours] = {
    "light": _Colours("#ffffff", INK, GREY, RULE, BLUE, CRIMSON),
    "dark": _Colours("#14181f", "#e8eaed", "#a3acb8", "#39414d", "#3d8fd1", "#ff6fa5"),
}
_COLOURS: ContextVar[_Colours] = ContextVar("colours", default=_THEMES["light"])


class Look(NamedTuple):
    colour: str
    marker: Any  # always a filled marker, because hollow ones show the doubtful values of `MARKS`
    dashes: tuple[float, ...] = ()  # lengths of dashes and gaps, in widths of the line; () is a solid line
    hatch: str = ""
    bold: bool = False

    @property
    def line(self) -> Any:
        return (0, self.dashes) if self.dashes else "-"


OWN = "kernel"  # the backend name in rows of the caller's own function
# `naive`, the plain formula, has the colour of the text. It, this project's fast backends and the caller's kernel have
# solid lines; all others are dashed.
LOOKS = {
    "naive": Look(INK, "o"),
    "naive_explicit": Look(GREY, "s", (1, 1.4), "...."),
    "reference": Look(GREY, "X", (1, 4), "oo"),
    "triton": Look(VERMILION, "D"),
    "cpu": Look(BLUE, "^"),
    "torch": Look(BLUE, "H", (), "--"),
    "tiled": Look(GREEN, "v", (), ".."),
    "sdpa_flash": Look(SKY, "P", (5, 2), "///"),
    "sdpa_cudnn": Look(ORANGE, "h", (6, 2, 1, 2), "\\\\\\"),
    "sdpa_efficient": Look(PURPLE, "<", (2.5, 1.2), "|||"),
    "sdpa_math": Look(GREY, ">", (5, 1.5, 1, 1.5, 1, 1.5), "---"),
    "flex": Look(ORANGE, (4, 1, 0), (11, 2.5), "xxx"),
    "flash_attn": Look(SKY, "p", (1.2, 2.6), "++"),
    "flash_attn_3": Look(BLUE, "d", (9, 2, 3, 2), "xx"),
    "flashinfer": Look(GREEN, (6, 1, 0), (2, 5), "**"),
    "xformers": Look(PURPLE, (3, 1, 0), (9, 2, 1, 2, 1, 2), "OO"),
    OWN: Look(CRIMSON, "*", bold=True),
}
_OTHER = Look(GREY, (5, 0, 180), (4, 4), "//")


@contextmanager
def themed(theme: PlotTheme) -> Iterator[None]:
    """Apply the settings of `theme` to matplotlib, for one thread at a time. Make figures inside this context."""
    chosen = _THEMES[theme]
    paper, ink, grey, rule, *_ = chosen
    settings: Any = {
        "svg.hashsalt": "flashpoint", "svg.fonttype": "none", "hatch.linewidth": 0.6,
        "figure.facecolor": paper, "axes.facecolor": paper, "text.color": ink, "axes.labelcolor": ink,
        "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": grey, "grid.color": rule,
    }  # fmt: skip
    before = _COLOURS.set(chosen)
    try:
        with _DRAWING, matplotlib.rc_context(settings):
            yield
    finally:
        _COLOURS.reset(before)


def paper() -> str:
    return _COLOURS.get().paper


def ink() -> str:
    return _COLOURS.get().ink


def grey() -> str:
    return _COLOURS.get().grey


def look(backend: str) -> Look:
    """Return the look of a backend in the current theme."""
    plain = LOOKS.get(backend, _OTHER)
    now = _COLOURS.get()
    themed = {INK: now.ink, GREY: now.grey, BLUE: now.blue, CRIMSON: now.crimson}
    return plain._replace(colour=themed.get(plain.colour, plain.colour))


def ordered(backends: Iterable[str]) -> list[str]:
    """Return each backend once, in the order that all pictures use."""
    known = list(LOOKS)
    return sorted(set(backends), key=lambda name: (known.index(name) if name in known else len(known), name))


def panels(
    title: str, subtitle: str, count: int, legend: Sequence[Artist] = (), *, columns: int | None = None,
    panel: tuple[float, float] | None = None, keys: int | None = None,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Return a figure and its `count` panels. `panel`: (width, height) of each in inches. `keys`: legend entries a row.

    The defaults of `columns`, `panel` and `keys` depend on `count` and on the width.
    """
    columns = columns or {1: 1, 2: 2, 4: 2, 6: 2}.get(count, 4 if count % 4 == 0 else 3)
    rows = math.ceil(count / columns)
    wide, high = panel or ({1: 6.4, 2: 4.8}.get(columns, 4.0), _PANEL_INCHES)
    width = wide * columns
    lines = textwrap.wrap(subtitle, int(width * 13.8))  # 9-point text has about 13.8 characters an inch
    keys = keys or max(1, int(width / 2.0))  # an entry of the legend takes about two inches
    above, below = 0.43 + _LINE_INCHES * len(lines), _KEY_INCHES * math.ceil(len(legend) / keys)
    height = high * rows + above + below
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", rect=(0, below / height, 1, 1 - (above + below) / height))
    figure.text(0.012, 1 - 0.12 / height, title, ha="left", va="top", fontsize=13, fontweight="bold")
    figure.text(0.012, 1 - 0.38 / height, "\n".join(lines), ha="left", va="top", fontsize=9, color=grey())
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for ax in axes[:count]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8.5, which="both", length=3)
        ax.grid(True, axis="y", linewidth=0.7)
        ax.set_axisbelow(True)
    if legend:
        figure.legend(handles=list(legend), loc="lower center", ncols=keys, frameon=False, fontsize=9, handlelength=2.8,
                      columnspacing=1.2)  # fmt: skip
    return figure, axes[:count]


def name(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=9.5)


def named(backend: str, kernel_name: str) -> str:
    """Return the name of a backend in a picture; `kernel_name` is the name of the caller's kernel."""
    return kernel_name if backend == OWN else backend


def key(backend: str, label: str | None = None) -> Line2D:
    """Return the entry of a backend in the legend. The line is long enough for its dashes."""
    return Line2D([], [], label=label or backend, **line(backend))


def line(backend: str, width: float = 1.7, size: float = 5.5) -> dict[str, Any]:
    """Return matplotlib's keywords for a backend's line. The line of the caller's kernel is boldest, and on top."""
    style = look(backend)
    return {
        "color": style.colour, "marker": style.marker, "linestyle": style.line,
        "linewidth": width + 2 if style.bold else width, "markersize": 2 * size if style.bold else size,
        "markeredgecolor": paper(), "markeredgewidth": 0.6, "zorder": 2.5 if style.bold else 2.0,
    }  # fmt: skip


def hollow(backend: str, size: float = 5.5) -> dict[str, Any]:
    """Return matplotlib's keywords for the hollow marker of a backend, without a line."""
    marker = line(backend, size=size)
    return marker | {"linestyle": "none", "markerfacecolor": paper(), "markeredgecolor": marker["color"],
                    "markeredgewidth": 1.2}  # fmt: skip


def bar(backend: str) -> dict[str, Any]:
    """Return matplotlib's keywords for a backend's bar. The bar of the caller's kernel has a thick edge."""
    style = look(backend)
    edge = {"edgecolor": ink(), "linewidth": 1.6} if style.bold else {"edgecolor": paper()}
    return {"facecolor": style.colour, "hatch": style.hatch, **edge}


def plain_lengths(ax: Axes, lengths: Iterable[int]) -> None:
    """Make the x axis logarithmic, with a label at each of `lengths` that is not too close to the previous label."""
    ax.set_xscale("log", base=2)
    every = sorted(set(lengths))
    apart = math.log2(every[-1] / every[0]) / 8
    named = every[:1]
    for length in every[1:]:
        if math.log2(length / named[-1]) >= apart:
            named.append(length)
    ax.set_xticks(named)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_length(x)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("sequence length", fontsize=9)


def short_length(n: float) -> str:
    """Return a length in at most five characters: 512, 12k."""
    return f"{n:g}" if n < 10_000 else f"{n / 1024:.4g}k"


def decades(ax: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with labels at 1 and 3 of each decade."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    ax.set(**{f"{which}scale": "log"})
    axis.set_major_locator(LogLocator(10, subs=(1, 3), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
    axis.set_minor_locator(NullLocator())


def around(values: Iterable[float], ratio: float = 12.0, room: float = 1.4) -> tuple[float, float]:
    """Return the limits (low, high) of a logarithmic axis: min(values) / `room` and max(values) · `room`, or farther
    apart, so that high ≥ ratio · low.
    """
    low, high = min(values := list(values)) / room, max(values) * room
    more = max(1.0, math.sqrt(ratio / (high / low)))
    return low / more, high * more


def si(value: float) -> str:
    """Return a number with at most three digits, or with all digits before the point: 0.02, 3, 450, 1,234."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def saved(draw: Callable[[], Figure], format: Format, theme: PlotTheme = "light") -> bytes:
    """Return the bytes of a figure's file. Equal figures give equal bytes. Thread-safe."""
    with themed(theme):
        out = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else None
        draw().savefig(out, format=format, dpi=PNG_DPI, metadata=metadata)
        return out.getvalue()
