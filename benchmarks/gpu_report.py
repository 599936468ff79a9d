"""Write DIR/report.md and DIR/timings.svg from a complete or partial run of `make gpu`: `benchmarks/gpu_report.py DIR`.

The report uses the newest row of each key in the newest environment. It leaves out rows of other sources, versions or
devices, and gives their number.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(path.parents[1]) for path in ROOT.glob("*/flashpoint*/__init__.py"))]

from benchmarks.gpu_day import plan  # noqa: E402
from benchmarks.gpu_day import record as records  # noqa: E402

Row = dict[str, Any]

FILE, PLOT = "report.md", "timings.svg"
LEVEL_STAGES = ("first", "table", "flex")  # stages whose shapes form one grid; the stage `papers` has other shapes
DIMS = (64, 128, 256)
MIB = 1 << 20


def write(out: Path, sizes: plan.Sizes | None = None) -> None:
    """Write the report and the plot of the record to `out`; `sizes` has the planned shapes."""
    rows = records.read(out / records.FILE)
    (out / FILE).write_text(text(rows, sizes or plan.Sizes()))
    if rows:
        environment = rows[-1]["environment"]
        plot(timed(records.latest(records.current(rows, environment)).values()), environment["device"], out / PLOT)


def text(rows: Sequence[Row], sizes: plan.Sizes) -> str:
    """Return the report in Markdown."""
    if not rows:
        return "# Kernels on a GPU\n\nNothing has been measured.\n"
    environment = rows[-1]["environment"]
    counted = records.current(rows, environment)
    latest = list(records.latest(counted).values())
    sections = [_head(environment, latest, len(rows) - len(counted)), _progress(latest, sizes, environment)]
    sections += [make(latest) for make in (_smoke, _levels, _grid, _papers, _decode, _sweep, _tests, _failures)]
    return "\n\n".join(filter(None, sections)) + "\n"


def timed(rows: Iterable[Row], stages: Sequence[str] = LEVEL_STAGES) -> list[Row]:
    """Return timing rows as flat rows; `deterministic` is torch's mode, the other `plan.MARKS` are our paths."""
    return [
        {**row["task"], **row["task"]["case"], **row["result"]}
        for row in rows
        if row["stage"] in stages and "result" in row and row["task"]["kind"] == "timed"
    ]


def trials(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the stage `sweep` as flat rows."""
    return [
        {**row["result"], "kernel": row["task"]["kernel"], "head_dim": row["task"]["shape"][-1]}
        for row in rows
        if row["stage"] == "sweep" and "result" in row
    ]


def point(row: Row) -> tuple[Any, ...]:
    """Return a key that is equal for rows that can be compared."""
    names = ("direction", "dtype", "head_dim", "causal", "batch", "q_heads", "kv_heads", "q_len")
    return tuple(row[name] for name in names)


def name_of(row: Row) -> str:
    """Return a row's name in the tables. Deterministic runs, and our runs on each path, have own names."""
    more = [name for name in plan.MARKS if row.get(name)]
    return " ".join([row["backend"], *more])


def ratios(rows: Iterable[Row], ours: str = "triton") -> dict[str, dict[str, float]]:
    """Return each peer's time / ours by direction: the geometric mean, the worst point and the number of points."""
    known = [row for row in rows if row["ms"] is not None]
    our_ms = {point(row): row["ms"] for row in known if name_of(row) == ours}
    times: dict[str, list[float]] = {}
    for row in known:
        if name_of(row) != ours and point(row) in our_ms:
            times.setdefault(f"{row['direction']} {name_of(row)}", []).append(row["ms"] / our_ms[point(row)])
    return {
        name: {"mean": geometric_mean(factors), "worst": min(factors), "points": len(factors)}
        for name, factors in sorted(times.items())
    }


def levels(by_peer: dict[str, dict[str, float]]) -> dict[str, str]:
    """Return the highest level of each direction: none, floor, goal or stretch; or "not measured" without peers.

    Floor: the forward is as fast as SDPA's flash backend (FlashAttention 2) at every point; our backward, which is
    deterministic, is as fast as the deterministic mode of that backend. Goal: 0.9 of the speed of cuDNN's forward, and
    0.75 of the speed of its backward. Stretch: as fast as cuDNN, and as FlashAttention 3 where it was timed.
    """

    def level(direction: str, floor: float | None, goal: float) -> str:
        means = [by_peer[n]["mean"] for n in (f"{direction} sdpa_cudnn", f"{direction} flash_attn_3") if n in by_peer]
        if floor is None or f"{direction} sdpa_cudnn" not in by_peer:
            return "not measured"
        if floor < 1:
            return "none"
        return "floor" if means[0] < goal else "goal" if min(means) < 1 else "stretch"

    flash = by_peer.get("forward sdpa_flash", {}).get("worst")
    deterministic = by_peer.get("backward sdpa_flash deterministic", {}).get("mean")
    return {"forward": level("forward", flash, 0.9), "backward": level("backward", deterministic, 0.75)}


def proposal(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Return the fastest trial of each kernel and head dimension, with the milliseconds of the shipped tile."""
    rows = list(rows)
    best: dict[str, dict[int, Row]] = {row["kernel"]: {} for row in rows}
    shipped = {(row["kernel"], row["head_dim"]): row["ms"] for row in rows if row["shipped"]}
    for row in sorted((row for row in rows if row["ms"] is not None), key=itemgetter("ms")):
        shipped_ms = shipped.get((row["kernel"], row["head_dim"]))
        best[row["kernel"]].setdefault(row["head_dim"], row | {"shipped_ms": shipped_ms})
    return best


def configuration(best: dict[str, dict[int, Row]]) -> str:
    """Return the proposed tiles as lines of configurations.py, for head dimensions where every kernel was timed.

    The path for Hopper has no kernel for some head dimensions, so its lines have only the timed kernels.
    """

    def tile(kernel: str, dim: int) -> str:
        return "Tile({block_m}, {block_n}, {num_warps}, {num_stages})".format(**best[kernel][dim])

    general = ("forward", "backward_kv", "backward_q")
    lines = [
        f"{dim}: Config({', '.join(tile(kernel, dim) for kernel in general)}),"
        for dim in DIMS
        if all(dim in best.get(kernel, {}) for kernel in general)
    ]
    for dim in DIMS:
        if known := [kernel for kernel in general if dim in best.get(f"{kernel}_hopper", {})]:
            tiles = ", ".join(f'"{kernel}": {tile(f"{kernel}_hopper", dim)}' for kernel in known)
            lines.append(f"{dim}: {{{tiles}}},")
    return "\n".join(lines)


def plot(rows: Sequence[Row], device: str, path: Path) -> None:
    """Plot TFLOP/s, counted as the papers do, against length: one panel for each direction, head dimension and mask."""
    from matplotlib.figure import Figure

    def panel(row: Row) -> tuple[bool, bool, int]:
        return row["direction"] != "forward", row["causal"], row["head_dim"]

    known = [row for row in rows if row["ms"] is not None and row["q_heads"] == row["kv_heads"]]
    panels = sorted({panel(row) for row in known})
    columns = len(DIMS)
    lines = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(4.5 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for at, (backward, causal, dim) in zip(axes.flat, panels, strict=False):
        here = [row for row in known if panel(row) == (backward, causal, dim)]
        for name in dict.fromkeys(map(name_of, here)):
            x, y = zip(*sorted((r["q_len"], r["tflops_standard"]) for r in here if name_of(r) == name), strict=True)
            at.plot(x, y, marker="o", markersize=3, linewidth=2.2 if name.startswith("triton") else 1, label=name)
        at.set_xscale("log", base=2)
        at.set_ylim(bottom=0)
        at.set_title(_panel(backward, dim, causal), fontsize=9)
        at.set(xlabel="length", ylabel="TFLOP/s")
    if panels:
        axes.flat[0].legend(fontsize=7)
    for at in axes.flat[len(panels) :]:
        at.axis("off")
    figure.suptitle(f"{device}, bfloat16")
    figure.savefig(path)


def table(head: Sequence[str], lines: Iterable[Sequence[Any]], title: str = "") -> str:
    """Return a Markdown table; with a title, return a section, or nothing if there are no rows."""
    rows = [head, ["---"] * len(head), *lines]
    if title and len(rows) == 2:
        return ""
    return f"## {title}\n\n" * bool(title) + "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def _head(environment: Row, measured: Sequence[Row], others: int) -> str:
    names = ("driver", "cuda", "torch", "triton", "python", "commit", "sources")
    versions = ", ".join(f"{name} {environment.get(name)}" for name in names)
    days = sorted(row["at"] for row in measured)
    clocks = [row["clocks"] for row in measured if row.get("clocks")]
    lines = [
        "# Kernels on a GPU", "", f"{environment['device']}; {versions}.", "",
        f"{len(measured)} rows, {days[0]} to {days[-1]}; {others} more of other sources, versions or devices.",
    ]  # fmt: skip
    if clocks:
        each = {name: [c[name] for c in clocks if name in c] for name in clocks[-1]}
        ranges = (f"{name} {min(a for a, _ in v):g} to {max(b for _, b in v):g}" for name, v in each.items() if v)
        lines += ["", f"While it was measured: {', '.join(ranges)}."]
    return "\n".join(lines)


def _progress(measured: Sequence[Row], sizes: plan.Sizes, environment: Row) -> str:
    """Return a table of the stages: planned, measured, bad. A timing that is planned by two stages counts in both."""
    bad = {row["key"] for row in measured if records.is_bad(row)}
    keys = {row["key"] for row in measured}
    lines = []
    for stage in plan.STAGES:
        planned = {row["key"] for row in measured if row["stage"] == stage}
        size: int | str = "" if planned else "not run"
        if stage in plan.TIMED_STAGES:
            planned = {task.key for group in plan.groups(stage, sizes, environment) for task in group.tasks}
            size = len(planned)
        lines.append((stage, size, len(planned & keys), len(planned & bad)))
    return table(("stage", "planned", "measured", "failed or wrong"), lines, "Progress")


def _smoke(measured: Sequence[Row]) -> str:
    lines = []
    for row in measured:
        if row["key"].startswith("smoke "):
            result = row.get("result") or {"errors": {}}
            verdict = row.get("failed") or ("ok" if result["ok"] else f"WRONG {' '.join(result['missing'])}".strip())
            errors = ", ".join(f"{name} {error:.2g} ({bound:.2g})" for name, (error, bound) in result["errors"].items())
            lines.append((row["task"]["name"], verdict, errors))
    return table(("kernel", "", "error (bound)"), lines, "Smoke tests")


def _levels(measured: Sequence[Row]) -> str:
    rows = timed(measured)
    parts = []
    for ours in ("triton", "triton stored", "triton hopper", "triton hopper stored", "triton hopper two_sets"):
        if each := ratios(rows, ours):
            reached = ", ".join(f"{name}: {level}" for name, level in levels(each).items())
            lines = [(name, f"{r['mean']:.3f}", f"{r['worst']:.3f}", r["points"]) for name, r in each.items()]
            head = ("times as fast as", "geometric mean", "worst", "points")
            parts.append(f"`{ours}`. Level reached: {reached}.\n\n{table(head, lines)}")
    return "## Levels\n\n" + "\n\n".join(parts) if parts else ""


def _grid(measured: Sequence[Row]) -> str:
    """Return TFLOP/s by length, in a table for each direction, head dimension, mask and head grouping."""
    rows = timed(measured)
    names = list(dict.fromkeys(name_of(row) for row in rows if row["ms"] is not None))
    grids: dict[tuple[bool, int, bool, int], dict[int, dict[str, str]]] = {}
    for row in rows:
        at = row["direction"] != "forward", row["head_dim"], row["causal"], row["q_heads"] // row["kv_heads"]
        cells = grids.setdefault(at, {}).setdefault(row["q_len"], {})
        cells[name_of(row)] = "" if row["ms"] is None else f"{row['tflops_standard']:.4g}"
    parts = []
    for (backward, dim, causal, group), by_length in sorted(grids.items()):
        lines = [(length, *(cells.get(name, "") for name in names)) for length, cells in sorted(by_length.items())]
        grouped = f", {group} heads a key" if group > 1 else ""
        parts.append(f"### {_panel(backward, dim, causal)}{grouped}\n\n{table(('length', *names), lines)}")
    return "## TFLOP/s\n\n" + "\n\n".join(parts) if parts else ""


def _panel(backward: bool, dim: int, causal: bool) -> str:
    return f"{'backward' if backward else 'forward'}, D {dim}{', causal' if causal else ''}"


def _papers(measured: Sequence[Row]) -> str:
    """Return the table of the papers' cases: milliseconds, speed over naive, and MiB beyond the inputs."""
    rows = [row for row in timed(measured, ("papers",)) if row["ms"] is not None]
    naive = {point(row): row["ms"] for row in rows if row["backend"] == "naive"}
    lines = []
    for row in sorted(rows, key=lambda r: (str(point(r)[:4]), r["q_len"], r["ms"])):
        shape = f"B {row['batch']}, H {row['q_heads']}, N {row['q_len']}, D {row['head_dim']}"
        faster = f"{naive[point(row)] / row['ms']:.2f}" if point(row) in naive else ""
        memory = "" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / MIB:.1f}"
        what = f"{row['direction']}, {row['dtype']}{', causal' if row['causal'] else ''}"
        lines.append((shape, what, name_of(row), f"{row['ms']:.4g}", faster, memory))
    head = ("shape", "", "", "ms", "times as fast as naive", "MiB")
    return table(head, lines, "The papers' tables")


def _decode(measured: Sequence[Row]) -> str:
    lines = []
    for row in measured:
        if row["stage"] == "decode" and row.get("result", {}).get("ms") is not None:
            t, r = row["task"], row["result"]
            shape = f"B {t['batch']}, H {t['q_heads']}/{t['kv_heads']}, keys {t['kv_len']}, D {t['head_dim']}"
            pages = f"pages of {t['page']}" if t["page"] else "whole"
            lines.append((shape, pages, t["backend"], f"{1e3 * r['ms']:.4g}", f"{r['gb_per_s']:.0f}"))
    head = ("shape", "keys and values", "", "µs", "GB/s")
    return table(head, lines, "Decode")


def _sweep(measured: Sequence[Row]) -> str:
    rows = trials(measured)
    if not rows:
        return ""
    best = proposal(rows)
    lines = []
    for kernel, by_dim in best.items():
        for dim, row in sorted(by_dim.items()):
            tile = f"{row['block_m']}×{row['block_n']}, {row['num_warps']} warps, {row['num_stages']} stages"
            shipped = "" if row["shipped_ms"] is None else f"{row['shipped_ms'] / row['ms']:.3f}"
            made = [row.get(name, "") for name in ("registers", "spills", "programs_per_multiprocessor")]
            lines.append((kernel, dim, tile, f"{row['ms']:.4g}", shipped, *made))
    head = ("kernel", "D", "fastest tile", "ms", "times as fast as shipped", "registers", "spills", "programs a SM")
    wrong = [row for row in rows if "wrong_by" in row]
    summary = f"{len(rows)} trials, {sum('refused' in row for row in rows)} refused, {len(wrong)} with wrong answers."
    if unread := Counter(row["occupancy"] for row in rows if "occupancy" in row):
        reasons = "; ".join(f"{reason} ({count})" for reason, count in unread.items())
        summary += f" Registers and spills could not be read in {unread.total()}: {reasons}."
    code = configuration(best)
    proposed = f"\n\nFor configurations.py:\n\n```python\n{code}\n```" if code else ""
    return f"## Sweep\n\n{summary}\n\n{table(head, lines)}{proposed}"


def _tests(measured: Sequence[Row]) -> str:
    counts: dict[str, Counter[str]] = {}
    for row in measured:
        if row["key"].startswith("test "):
            counts.setdefault(row["key"].split()[1], Counter())[row["result"]["outcome"]] += 1
    names = ("passed", "failed", "skipped")
    lines = [(suite, *(count[name] for name in names)) for suite, count in counts.items()]
    return table(("suite", *names), lines, "Tests")


def _failures(measured: Sequence[Row]) -> str:
    """Return the failures with their messages, and each reason why something cannot run here, once."""
    lines = []
    for row in measured:
        if records.is_bad(row):
            result = row.get("result") or {}
            wrong = f"wrong: {result.get('wrong_by', result.get('errors'))}"
            message = row.get("failed") or result.get("message") or wrong
            lines.append(f"- `{row['key']}`: {' '.join(str(message).split())[-400:]}")
    skipped = {
        (row["task"].get("backend") or row["task"]["case"]["backend"], row["result"]["skipped"]): None
        for row in measured
        if (row.get("result") or {}).get("skipped")
    }
    parts = ["## Failed or wrong\n\n" + "\n".join(lines)] if lines else []
    if skipped:
        parts.append("## Cannot run here\n\n" + "\n".join(f"- `{name}`: {why}" for name, why in skipped))
    return "\n\n".join(parts)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
