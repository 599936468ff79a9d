"""Draw the pictures of docs/when-remote-attention-pays.md: predictions of the capacity calculator, and measurements.

Lines are predictions. Their labels give the assumed rates, which were not measured on any device. Dots are measurements
from benchmarks/results/capacity-*.json. Writes docs/images/capacity-*.svg.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from flashpoint import capacity
from flashpoint.plots.style import BLUE, GREEN, INK, VERMILION
from flashpoint_contract.schemas.shapes import Shape

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
HEADS, DIM = 32, 128  # as many as models of seven billion parameters have
CALL, ROUND_TRIP = 1.6e-3, 0.5e-3  # docs/performance.md; within a data centre
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
    memory = 2e12  # bytes a second, assumed: an HBM device reads keys and values at some such rate
    return capacity.Rates(
        call=CALL, upload=link, download=link, flops=flops, grad_flops=flops, memory=memory, round_trip=ROUND_TRIP
    )


def regimes() -> Figure:
    """Where the time of a remote call goes, by length."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (name, (_, need)) in zip(figure.subplots(1, 3, sharey=True), KINDS.items(), strict=True):
        lengths = LENGTHS[::20]
        found = [capacity.predict(need(int(n)), rates(100)).stages for n in lengths]
        lines = {
            "round trip and call": [s["round trip"] + s["call"] for s in found],
            "bytes": [s["upload"] + s["download"] for s in found],
            "computing": [s["compute"] for s in found],
        }
        for (label, seconds), style in zip(lines.items(), (":", "--", "-"), strict=True):
            axes.loglog(lengths, np.array(seconds) * 1e3, style, label=label, color=INK)
        axes.set(title=name, xlabel="keys" if name == "decode" else "length", ylim=(1e-3, 1e5))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("predicted milliseconds")
    figure.axes[0].legend(frameon=False)
    title = f"Predicted: {HEADS} heads of {DIM}, bfloat16, 100 Gbit/s, a server of {SERVER / 1e12:.0f} TFLOP/s"
    figure.suptitle(title, fontsize=10)
    return figure


def crossing(need: Callable[[int], capacity.Need], own: float, far: capacity.Rates) -> float:
    """The least length from which a remote call is faster than `own` FLOP/s at home; NaN where there is none."""
    for n in LENGTHS:
        asked = need(int(n))
        if capacity.predict(asked, far).seconds < asked.flops / own:
            return float(n)
    return float("nan")


def break_even() -> Figure:
    """From which length a remote call is faster, by the network, for several devices at home."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    networks = np.geomspace(1, 400, 40)
    for own, style in ((0.2e12, "-"), (2e12, "--"), (20e12, ":")):
        for name in ("forward", "gradient"):
            colour, need = KINDS[name]
            lengths = [crossing(need, own, rates(gbit)) for gbit in networks]
            axes.loglog(networks, lengths, style, color=colour, label=f"{name}, {own / 1e12:g} TFLOP/s at home")
    axes.set(xlabel="network, Gbit/s each way", ylabel="length from which remote is faster", ylim=(16, 300000))
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(
        f"Predicted: {HEADS} heads of {DIM}, bfloat16, not causal, a server of {SERVER / 1e12:.0f} TFLOP/s", fontsize=10
    )
    return figure


def held_against(path: Path) -> Figure:
    """Each case's measured time over its predicted one."""
    result: dict[str, Any] = json.loads(path.read_text())
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes = figure.subplots()
    for row in result["cases"]:
        axes.loglog(row["predicted_ms"], row["measured_ms"], "o", color=VERMILION)
        axes.annotate(row["case"], (row["predicted_ms"], row["measured_ms"]), fontsize=7, xytext=(5, -3),
                      textcoords="offset points")  # fmt: skip
    ends = np.array([min(r["predicted_ms"] for r in result["cases"]), max(r["predicted_ms"] for r in result["cases"])])
    for factor, style in ((1, "-"), (1.5, ":"), (1 / 1.5, ":")):
        axes.loglog(ends, ends * factor, style, color=INK, linewidth=1)
    made = result["environment"]
    axes.set(xlabel="predicted milliseconds", ylabel="measured milliseconds")
    axes.set_title(f"{made['device']}, {made['date'][:10]}; dotted: 1.5 times more or less", fontsize=10)
    axes.grid(alpha=0.3)
    axes.set_xlim(ends[0] * 0.7, ends[1] * 3.5)
    return figure


def main() -> int:
    mpl.rcParams["svg.hashsalt"] = "flashpoint"  # the same file from the same numbers
    figures = {"regimes": regimes(), "break-even": break_even()}
    for path in sorted((ROOT / "benchmarks" / "results").glob("capacity-*.json")):
        figures[path.stem.removeprefix("capacity-")] = held_against(path)
    for name, figure in figures.items():
        figure.savefig(IMAGES / f"capacity-{name}.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
