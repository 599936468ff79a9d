"""Figures of the documentation that are drawn from benchmark results or by a script, by file name without ending."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import figures
from flashpoint.plots import benchmark_figure
from flashpoint_contract.schemas.benchmark import BenchmarkJob

from . import capacity, tiles

ROOT = Path(__file__).resolve().parents[2]
RESULTS, EXAMPLES = ROOT / "benchmarks" / "results", ROOT / "examples"
_MADE: dict[str, Callable[[Any], Figure]] = {
    "load": figures.latency, "overload": figures.overload, "soak": figures.soak, "capacity": capacity.held_against,
}  # fmt: skip


def every() -> dict[str, Callable[[], Figure]]:
    """Return, by the figure's name, the function that draws it. Call that function inside `style.themed`."""
    found: dict[str, Callable[[], Figure]] = {
        "capacity-regimes": capacity.regimes, "capacity-break-even": capacity.break_even, "tiles": tiles.tiles,
    }  # fmt: skip
    for kind, draw in _MADE.items():
        for path in sorted(RESULTS.glob(f"{kind}-*.json")):
            found[path.stem] = partial(draw, json.loads(path.read_text()))
    for path in sorted(RESULTS.glob("reproduce-*.json")):
        result = json.loads(path.read_text())
        for kind in ("time", "roofline") if result["rows"] else ():
            found[f"{path.stem}-{kind}"] = partial(benchmark_figure, _job(result), kind)
    training = json.loads((RESULTS / "train-gpt.json").read_text())
    draw = _example("train_gpt")["draw"]
    found["train-gpt"] = partial(draw, training["curves"], figures.about(training))
    flow, example = json.loads((RESULTS / "mean-flow.json").read_text()), _example("mean_flow")
    runs = {way: example["Trained"](**run) for way, run in flow["runs"].items()}
    found["mean-flow"] = partial(example["draw"], runs, figures.about(flow))
    evicted = json.loads((RESULTS / "evict.json").read_text())
    found["evict"] = partial(_example("evict")["draw"], evicted["shares"], evicted["whole"], figures.about(evicted))
    return found


def _example(name: str) -> dict[str, Any]:
    """Return the names that an example defines."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def _job(result: dict[str, Any]) -> BenchmarkJob:
    made = result["environment"]
    about = {"id": "local", "created": made["date"], "request": {"preset": "papers"}, "device": made["device"]}
    return BenchmarkJob.model_validate({**about, "rows": result["rows"], "environment": made})
