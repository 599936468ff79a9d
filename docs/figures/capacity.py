"""Pictures of docs/when-remote-attention-pays.md: predictions of the capacity calculator, and measurements.

Lines are predictions. Their labels give the assumed rates, which were not measured on any device. Dots are measurements
from benchmarks/results/capacity-*.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashpoint import capacity
from flashpoint.plots import style
from flashpoint.plots.style import BLUE, GREEN, INK, VERMILION
from flashpoint_contract.schemas.shapes import Shape

HEADS, DIM = 32, 128  # as many as models of seven billion parameters have
CALL, ROUND_TRIP = 1.6e-3, 0.5e-3  # seconds: a call, from docs/performance.md; a round trip within a data centre
SERVER = 400e12  # FLOP/s of attention, assumed
LENGTHS = np.unique(np.geomspace(16, 262144, 1000).astype(int))
KINDS: dict[str, tuple[str, Callable[[int], capacity.Need]]] = {
    "forward": (BLUE, lambda n: _need(n, n, "forward")),
    "gradient": (VERMILION, lambda n: _need(n, n, "backward")),
    "decode": (GREEN, lambda n: _need(1, n, "forward")),
}


def _need(q_len: int, kv_len: int, side: capacity.Side) -> capacity.Need:
    shape = Shape(q_heads=HEADS, q_len=q_len, kv_len=kv_len, head_dim=DIM)
    return capacity.need(shape, dtype="bfloat16", side=side)


def rates(network_gbit: float, flops: float = SERVER) -> capacity.Rates:
    link = network_gbit * 1e9 / 8
    memory = 2e12  # bytes a second, assumed: typical for a device with HBM
    return capacity.Rates(
        call=CALL, upload=link, download=link, flops=flops, grad_flops=flops, memory=memory, round_trip=ROUND_TRIP
    )


def regimes() -> Figure:
    """Plot the predicted time of each part of a remote call against the sequence length."""
    lines = {"round trip and call": ":", "bytes": "--", "computing": "-"}
    figure, axes = style.panels(
        "Predicted: where the time of a call goes",
        f"{HEADS} heads of {DIM}, bfloat16, 100 Gbit/s, a server of {SERVER / 1e12:.0f} TFLOP/s",
        len(KINDS), [Line2D([], [], label=name, linestyle=line, color=INK) for name, line in lines.items()],
    )  # fmt: skip
    for ax, (name, (_, need)) in zip(axes, KINDS.items(), strict=True):
        lengths = LENGTHS[::20]
        found = [capacity.predict(need(int(n)), rates(100)).stages for n in lengths]
        parts = {
            "round trip and call": [s["round trip"] + s["call"] for s in found],
            "bytes": [s["upload"] + s["download"] for s in found],
            "computing": [s["compute"] for s in found],
        }
        for label, seconds in parts.items():
            ax.loglog(lengths, np.array(seconds) * 1e3, lines[label], color=INK, linewidth=1.7)
        style.name(ax, name)
        ax.set_xlabel("keys" if name == "decode" else "length", fontsize=9)
        ax.set_ylim(1e-3, 1e5)
    axes[0].set_ylabel("predicted milliseconds", fontsize=9)
    return figure


def crossing(need: Callable[[int], capacity.Need], own: float, far: capacity.Rates) -> float:
    """Return the least length at which a call to a server with the rates `far` is faster than a local device.

    The local device computes `own` FLOP/s. Return NaN if the call is faster at no length.
    """
    for n in LENGTHS:
        asked = need(int(n))
        if capacity.predict(asked, far).seconds < asked.flops / own:
            return float(n)
    return float("nan")


def break_even() -> Figure:
    """Plot, against the network's rate, the length from which a remote call is faster than a local device.

    There is a line for each of several local devices, in forward and gradient.
    """
    lines = [
        (name, own, Line2D([], [], label=f"{name}, {own / 1e12:g} TFLOP/s at home", color=KINDS[name][0],
                           linestyle=line, linewidth=1.7))
        for name in ("forward", "gradient")
        for own, line in ((0.2e12, "-"), (2e12, "--"), (20e12, ":"))
    ]  # fmt: skip
    figure, (ax,) = style.panels(
        "Predicted: from which length remote is faster",
        f"{HEADS} heads of {DIM}, bfloat16, not causal, a server of {SERVER / 1e12:.0f} TFLOP/s",
        1, [line for _, _, line in lines], panel=(8.0, 3.8), keys=2,
    )  # fmt: skip
    networks = np.geomspace(1, 400, 40)
    for name, own, line in lines:
        lengths = [crossing(KINDS[name][1], own, rates(gbit)) for gbit in networks]
        ax.loglog(networks, lengths, color=line.get_color(), linestyle=line.get_linestyle(), linewidth=1.7)
        ax.annotate(
            f"{own / 1e12:g} at home" if name == "forward" else "", (networks[-1], lengths[-1]), xytext=(4, 2),
            textcoords="offset points", fontsize=8, color=style.grey(), va="center", annotation_clip=False,
        )  # fmt: skip
    ax.set_xlabel("network, Gbit/s each way", fontsize=9)
    ax.set_ylabel("length from which remote is faster", fontsize=9)
    ax.set_ylim(16, 300000)
    return figure


def held_against(result: Mapping[str, Any]) -> Figure:
    """Plot the measured time of each case against the predicted time."""
    made = result["environment"]
    legend = [
        Line2D([], [], label="measured", linestyle="none", marker="o", color=VERMILION),
        Line2D([], [], label="as predicted", color=INK, linewidth=1),
        Line2D([], [], label="1.5 times more or less", color=INK, linewidth=1, linestyle=":"),
    ]
    figure, (ax,) = style.panels(
        "Predicted and measured", f"{made['device']}, {made['date'][:10]}", 1, legend, panel=(7.0, 4.6)
    )
    cases = sorted(result["cases"], key=lambda row: row["measured_ms"] / row["predicted_ms"])
    for row in cases:
        ax.loglog(row["predicted_ms"], row["measured_ms"], "o", color=VERMILION)
    ends = np.array([min(r["predicted_ms"] for r in cases), max(r["predicted_ms"] for r in cases)])
    for factor, line in ((1, "-"), (1.5, ":"), (1 / 1.5, ":")):
        ax.loglog(ends, ends * factor, line, color=INK, linewidth=1)
    ax.set_xlim(ends[0] * 0.7, ends[1] * 1.5)
    for row, (x, y) in zip(cases, _beside(cases), strict=True):
        ax.annotate(row["case"], (row["predicted_ms"], row["measured_ms"]), fontsize=7.5, xytext=(x, y),
                    textcoords="axes fraction", va="center",
                    arrowprops={"arrowstyle": "-", "color": style.grey(), "linewidth": 0.6})  # fmt: skip
    ax.set_xlabel("predicted milliseconds", fontsize=9)
    ax.set_ylabel("measured milliseconds", fontsize=9)
    return figure


def _beside(cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the position (x, y) of each case's label, in fractions of the axes.

    The labels are a column right of the plot, in the order of the measured times.
    """
    order = sorted(range(len(cases)), key=lambda at: cases[at]["measured_ms"])
    heights = {at: 0.04 + 0.9 * place / len(cases) for place, at in enumerate(order)}
    return [(1.02, heights[at]) for at in range(len(cases))]
