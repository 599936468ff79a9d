"""Draw the errors of a verification: histograms of the errors, and their bounds."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flashpoint.plots import style
from flashpoint_contract.schemas.verify import Judgement, VerifyReport

_INFINITE = 309  # the exponent in `Decade` for an infinite error
_WIDTH = 0.94  # width of a bar, in decades


def histograms(report: VerifyReport) -> Figure:
    """Return a figure with a panel for each tensor."""
    verdict = "all within their bounds" if report.ok else "NOT all within their bounds"
    about = f"{report.backend} · {report.dtype} · {report.device} · against float64"
    figure, axes = style.panels(f"Errors: {verdict}", about, len(report.tensors), [])
    for ax, judged in zip(axes, report.tensors, strict=True):
        _panel(ax, judged)
    return figure


def _panel(ax: Axes, judged: Judgement) -> None:
    decades = {d.exponent: d.count for d in judged.histogram}
    exact, infinite = decades.pop(None, 0), decades.pop(_INFINITE, 0)
    exponents = sorted(e for e in decades if e is not None)
    low, high = (exponents[0], exponents[-1]) if exponents else (-8, -1)
    if math.isfinite(judged.bound) and judged.bound >= 0:
        decade = math.floor(math.log10(judged.bound)) if judged.bound else low
        low, high = min(low, decade), max(high, decade)
        place = math.log10(judged.bound) if judged.bound else low - 0.33  # right of the bar of exact elements
        ax.axvline(place, color=style.VERMILION, linewidth=1.6)
        right = place < (low + high) / 2  # put the label on the side with more room
        ax.annotate(
            f"bound {judged.bound:.1e}" if judged.bound else "bound 0", (place, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4 if right else -4, 0), textcoords="offset points", fontsize=8, color=style.VERMILION,
            ha="left" if right else "right", va="top",
        )  # fmt: skip
    for exponent in exponents:
        _bar(ax, exponent, decades[exponent], 10.0**exponent >= judged.bound)
    step = math.ceil((high - low + 2) / 6)
    ticks: dict[float, str] = {low - 1.13: "0"} | {n: f"$10^{{{n}}}$" for n in range(low, high + 2, step)}
    ax.bar(low - 1.6, exact, _WIDTH, align="edge", facecolor=style.SKY, edgecolor=style.paper())
    if infinite:
        high += 2
        _bar(ax, high, infinite, True)
        ticks[high + _WIDTH / 2] = "∞"
    ax.set_yscale("symlog", linthresh=1)
    ax.set_ylim(0, 8 * max(exact, infinite, *decades.values(), 1))  # room for the label of the bound
    ax.set_xlim(low - 1.8, high + 1.3)
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    ax.set_xlabel("error", fontsize=9)
    ax.set_ylabel("elements", fontsize=9)
    style.name(ax, f"{judged.name}: {'within' if judged.ok else 'NOT within'} its bound\nlargest {judged.max_abs:.1e}")


def _bar(ax: Axes, exponent: int, count: int, over: bool) -> None:
    ax.bar(
        exponent, count, _WIDTH, align="edge", edgecolor=style.paper(), hatch="///" if over else "",
        facecolor=style.VERMILION if over else style.BLUE,
    )  # fmt: skip
