"""The picture of docs/algorithm.md: which tiles of the scores a program computes, in which order, and what it keeps."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from flashpoint.plots import style

BLOCKS, TILES = 4, 6  # number of blocks of queries, and of tiles of keys
HELD, NOW, DONE, SKIPPED = style.GREEN, style.ORANGE, "#bfe3f7", "#eeeeee"


class Program(NamedTuple):
    """A program (thread block) of a kernel, to draw at one step of its loop over tiles."""

    title: str
    along: str  # what the loop goes over: "keys" or "queries"
    own: int  # index of the block of queries or the tile of keys that the program holds during the loop
    at: int  # index of the step of the loop that is drawn
    result: tuple[str, str]  # what the program keeps during the loop, and what it writes at the end


PROGRAMS = (
    Program("forward: a block of queries", "keys", 2, 2, ("keeps m, ℓ, A", "writes O, L")),
    Program("gradients of K and V: a tile of keys", "queries", 1, 2, ("keeps dK, dV", "writes dK, dV")),
    Program("gradient of Q: a block of queries", "keys", 2, 1, ("keeps dQ", "writes dQ")),
)


def seen(block: int, tile: int) -> bool:
    """Return whether a query of the block sees a key of the tile, under a causal mask aligned at the end."""
    return tile / TILES < (block + 1) / BLOCKS


def tiles() -> Figure:
    """Draw the tiles of S that a program of each of the three kernels computes."""
    legend = [
        Patch(facecolor=HELD, label="held by the program"),
        Patch(facecolor=NOW, label="loaded or computed now"),
        Patch(facecolor=DONE, label="computed before, forgotten"),
        Patch(facecolor="white", edgecolor=style.GREY, label="computed later, or by another program"),
        Patch(facecolor=SKIPPED, edgecolor=style.GREY, hatch="xxx", label="hidden by the causal mask, skipped"),
    ]
    figure, axes = style.panels(
        "One tile of S at a time", "each program holds one block and loops over the other side", len(PROGRAMS), legend,
        columns=1, panel=(4.4, 2.75), keys=1,  # narrow: it can be read on a phone
    )  # fmt: skip
    for ax, program in zip(axes, PROGRAMS, strict=True):
        _draw(ax, program)
    return figure


def _draw(ax: Axes, program: Program) -> None:
    over_keys = program.along == "keys"
    style.name(ax, program.title)
    for block in range(BLOCKS):
        for tile in range(TILES):
            mine = (block if over_keys else tile) == program.own
            step = tile if over_keys else block
            colour = NOW if mine and step == program.at else DONE if mine and step < program.at else "white"
            visible = seen(block, tile)
            _box(ax, tile, block, colour if visible else SKIPPED, "" if visible else "xxx")
    now = (program.at, program.own) if over_keys else (program.own, program.at)
    _text(ax, now[0] + 0.5, now[1] + 0.5, "S")
    for block in range(BLOCKS):
        mine = block == (program.own if over_keys else program.at)
        _box(ax, -1.4, block, (HELD if over_keys else NOW) if mine else "white")
    for tile in range(TILES):
        mine = tile == (program.at if over_keys else program.own)
        _box(ax, tile, -1.4, (NOW if over_keys else HELD) if mine else "white")
    _text(ax, -1.15, BLOCKS + 0.35, "Q" if program.title.startswith("forward") else "Q, dO, L")
    _text(ax, TILES + 0.65, -0.9, "K, V")
    start, end = ((0.0, 0.0), (0.0, 0.0))
    if over_keys:
        start, end = (0.1, program.own + 1.3), (TILES * 0.72, program.own + 1.3)
    else:
        start, end = (program.own + 1.3, 0.6), (program.own + 1.3, BLOCKS - 0.1)
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.6})
    _text(ax, TILES / 2, BLOCKS + 0.35, f"loop over the {program.along}: {program.result[0]}")
    _text(ax, TILES / 2, BLOCKS + 0.85, f"at its end {program.result[1]}")
    ax.set_xlim(-2.2, TILES + 1.4)
    ax.set_ylim(BLOCKS + 1.2, -1.6)
    ax.set_aspect("equal")
    ax.grid(False)
    ax.set(xticks=[], yticks=[])
    ax.set_axis_off()


def _box(ax: Axes, x: float, y: float, colour: str, hatch: str = "") -> None:
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=style.GREY, linewidth=0.8, hatch=hatch))


def _text(ax: Axes, x: float, y: float, text: str) -> None:
    ax.text(x, y, text, ha="center", va="center", fontsize=9)
