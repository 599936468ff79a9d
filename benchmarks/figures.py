"""Draw the recorded results of load, overload and soak tests with matplotlib, in the style of `flashpoint.plots`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashpoint.plots import style

Result = Mapping[str, Any]
_PERCENTILES: dict[str, Any] = {
    name: {"color": colour, "marker": marker, "linestyle": line, "linewidth": 1.7, "markersize": 5}
    for name, colour, marker, line in (
        ("p50", style.BLUE, "o", "-"), ("p95", style.ORANGE, "s", "--"), ("p99", style.VERMILION, "D", ":"),
    )
}  # fmt: skip
_SOAK = {
    "resident_mib": "resident, MiB", "private_mib": "private, MiB", "shared_mib": "shared, MiB",
    "descriptors": "descriptors", "threads": "threads",
}  # fmt: skip


def about(result: Result) -> str:
    environment = result["environment"]
    return f"{environment['device']}, {environment['cores']} cores · {environment['date'][:10]}"


def latency(result: Result) -> Figure:
    """Plot percentiles of the latency against the offered rate, measured in an open loop."""
    curve = [step for step in result["steps"] if step["scenario"] == "saturation"]
    legend = [Line2D([], [], label=name, **look) for name, look in _PERCENTILES.items()]
    figure, (ax,) = style.panels(
        "Latency against the offered rate", f"{about(result)} · a mix of calls in an open loop", 1,
        [*legend, _guide("capacity")], panel=(7.0, 3.6), keys=4,
    )  # fmt: skip
    for name, look in _PERCENTILES.items():
        ax.plot([step["offered"] for step in curve], [step[f"{name}_ms"] for step in curve], **look)
    ax.axvline(result["capacity"], **_GUIDE)
    style.decades(ax, "y")
    ax.set(xlabel="calls offered a second", ylabel="milliseconds to the answer", xlim=(0, None))
    return figure


def overload(result: Result) -> Figure:
    """Plot the rate of calls answered in time against the offered rate."""
    steps = result["steps"]
    best = max(step["answered"] for step in steps[:-1])
    legend = [Line2D([], [], label="answered in time", **_LINE), _guide("the most")]
    figure, (ax,) = style.panels(
        "Answered against offered, to ten times the capacity", about(result), 1, legend, panel=(7.0, 3.6)
    )
    open_loop = [step for step in steps[:-1] if step["offered"] is not None]
    ax.plot([step["offered"] for step in open_loop], [step["answered"] for step in open_loop], **_LINE)
    ax.axhline(best, **_GUIDE)
    ax.set(xlabel="calls offered a second", ylabel="calls a second", xlim=(0, None), ylim=(0, 1.1 * best))
    return figure


def soak(result: Result) -> Figure:
    """Plot the memory, file descriptors and threads of the service's processes, and the latency, against time."""
    windows = result["windows"]
    minutes = [window["minutes"] for window in windows]
    lines = {name: look | {"marker": "None"} for name, look in _PERCENTILES.items()}
    legend = [Line2D([], [], label=name, **look) for name, look in lines.items()]
    subtitle = f"{about(result)} · a mix of calls at {result['offered']:g} a second, 70% of the capacity"
    figure, axes = style.panels(
        "An hour under load", subtitle, len(_SOAK) + 1, legend, columns=2, panel=(4.8, 2.2)
    )  # fmt: skip
    for ax, (name, label) in zip(axes, _SOAK.items(), strict=False):
        values = [window[name] for window in windows]
        ax.plot(minutes, values, color=style.BLUE, linewidth=1.7)
        ax.set_ylim(0, 1.25 * max(values))
        style.name(ax, label)
    for name, look in lines.items():
        axes[-1].plot(minutes, [window[f"{name}_ms"] or float("nan") for window in windows], **look)
    style.decades(axes[-1], "y")
    style.name(axes[-1], "latency, milliseconds")
    for ax in axes[-2:]:
        ax.set_xlabel("minutes of load", fontsize=9)
    return figure


_GUIDE: Any = {"color": style.GREY, "linestyle": (0, (1, 1.5)), "linewidth": 1.4, "zorder": 1.0}
_LINE: Any = {"color": style.BLUE, "marker": "o", "linewidth": 1.7, "markersize": 5.5}


def _guide(label: str) -> Line2D:
    return Line2D([], [], label=label, **_GUIDE)
