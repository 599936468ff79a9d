"""Time each option alone, beside the formula, FlexAttention and torch's operator: `python benchmarks/options.py`.

At (1,8,2048,64) in float32 on the CPU, `flashpoint_kernels.attention` with `auto` alternates in one process with:

    forward, gradient   attention written out with its whole matrix, in plain torch operations and autograd
    flex                FlexAttention by torch.compile, where it has the option; needs a C++ compiler
    decode              torch's fused operator, one query of 8 sequences over 4,096 keys, in pages too
    plain               torch's fused operator without options: types, D, N, with and without the gradient
    flex_attention      our `flex_attention` beside torch's and beside the formula
    block_masks         `tiled` with a block mask beside `tiled` without one

`--only NAME` measures one section, in at most 7 minutes, and keeps the file's other sections. With `--runs N` each
figure is the median of N runs, and a row also has the ratio of every run. Targets: 0.85 of FlexAttention's speed in the
geometric mean, and at least 0.7; twice as fast as the formula, with a quarter of its memory, not counting inputs and
answers. Each row of `decode` has its own target, and `plain_bounds` has the targets of `plain`. With a block mask that
keeps 1/16 of the blocks, a call is six times as fast as without a mask. options_peers.py has the sections.

Much of the formula's time is the system's allocation of new memory at each call. So the formula is timed in two
processes. With torch's defaults, our target is twice the formula's speed. With huge pages (THP_MEM_ALLOC_ENABLE=1), it
is 1.2 times the formula's speed for the forward, and the same speed with the gradient. Writes
benchmarks/results/options-<cpu>.json. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from record import file_name
from runner import SERVICE, Args, Option, apart, environment, run, target

SECTIONS = ("forward", "gradient", "flex", "decode", "plain", "flex_attention", "block_masks")
# Disable the cache on disk, so that FlexAttention's compile time is that of its first use.
VARIABLES = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

Row = dict[str, Any]


def sections() -> Mapping[str, Callable[[int], Iterator[Row]]]:
    import options_peers  # this imports torch

    return options_peers.SECTIONS


def measured(section: str, rounds: int, huge_pages: bool = False) -> list[Row]:
    """Return the rows of a section, measured in a separate process."""
    with apart(sections, **VARIABLES, THP_MEM_ALLOC_ENABLE=str(int(huge_pages))) as ask:
        rows: list[Row] = ask(section, rounds)
        return rows


def rows_of(section: str, rounds: int, runs: int) -> list[Row]:
    """Return the rows of a section; with several runs, each figure is a median, and a row has the ratio of each run."""
    every = [run_of(section, rounds) for _ in range(runs)]
    if runs == 1:
        return every[0]
    return [merged(rows) | {"runs": [row["times"] for row in rows]} for rows in zip(*every, strict=True)]


def merged(rows: Sequence[Row]) -> Row:
    """Return one row with the medians of the same row from several runs."""

    def of_all(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return merged(values)
        return median(values) if isinstance(values[0], float) else values[0]

    return {name: of_all([row[name] for row in rows]) for name in rows[0]}


def run_of(section: str, rounds: int) -> list[Row]:
    rows = measured(section, rounds)
    if section in ("forward", "gradient"):
        for row, other in zip(rows, measured(section, rounds, True), strict=True):
            row["huge_pages"] = {name: other[name] for name in ("ms", "other_ms", "times")}
    return rows


def targets(rows: Mapping[str, list[Row]]) -> list[Row]:
    """Return the targets of the sections that were measured."""
    made = []

    def bound(
        what: str, of: Callable[[list[float]], float], values: list[float], unit: str = "time", **limit: float
    ) -> None:
        if values:
            made.append(target(what, of(values), unit, **limit))

    for section, name, huge_pages in (("forward", "forward", 1.2), ("gradient", "with gradient", 1.0)):
        each = rows.get(section, [])
        faster, huge = [row["times"] for row in each], [row["huge_pages"]["times"] for row in each]
        bound(f"{name}: over the formula, least", min, faster, "times faster", least=2.0)
        bound(f"{name}: the same with huge pages", min, huge, "times faster", least=huge_pages)
        bound(f"{name}: memory / the formula's, most", max, [row["memory"] for row in each], "size", most=0.25)
    beside_flex = [row["times"] for row in rows.get("flex", []) if row["counted"]]
    bound("FlexAttention's time / ours, geometric mean", geometric_mean, beside_flex, least=0.85)
    bound("FlexAttention's time / ours, least", min, beside_flex, least=0.7)
    for row in rows.get("decode", []):
        bound(f"torch's operator's time / ours, {row['decode']}", min, [row["times"]], least=row["least"])
    plain = rows.get("plain", [])
    for what, kind, least in plain_bounds(any(row["kernel"] == "c-amx" for row in plain)):
        times = [row["times"] for row in plain if all(row[name] == value for name, value in kind.items())]
        bound(f"SDPA's time / ours, {what}, least", min, times, least=least)
    if not any(row["kernel"] == "c-amx" for row in plain):
        for gradient, most in (("forward", 1.05), ("with gradient", 1.1)):
            ms = {tuple(row[name] for name in ("dtype", "head_dim", "causal")): row["ms"] for row in plain
                  if (row["pass"], row["length"]) == (gradient, 2048)}  # fmt: skip
            over = [ms["bfloat16", *kind] / ms["float32", *kind] for dtype, *kind in ms if dtype == "bfloat16"]
            bound(f"bfloat16's time / float32's, N 2048 {gradient}, most", max, over, most=most)
    others = {"forward": "torch's flex_attention, not compiled", "with gradient": "the formula"}
    for gradient, other in others.items():
        times = [row["times"] for row in rows.get("flex_attention", []) if row["pass"] == gradient]
        bound(f"flex_attention {gradient}: {other}'s time / ours, least", min, times, least=1.0)
    for row in rows.get("block_masks", []):
        if row["share"] < 0.1:
            bound(f"{row['pass']} without / with {row['mask']}", min, [row["times"]], "times faster", least=6.0)
    return made


def plain_bounds(amx: bool) -> Iterator[tuple[str, Row, float]]:
    """Yield each target of the section `plain`: its name, the rows that it applies to, and the least ratio."""
    for dtype in ("float32", "float16"):
        forward: Row = {"pass": "forward", "dtype": dtype}
        yield f"{dtype} N 2048", {**forward, "length": 2048, "causal": False}, 1.08 if amx else 1.0
        yield f"{dtype} N 2048 causal", {**forward, "length": 2048, "causal": True}, 1.3 if amx else 1.2
        yield f"{dtype} N 512", {**forward, "length": 512, "causal": False}, 1.05 if amx else 1.0
        yield f"{dtype} N 128", {**forward, "length": 128, "causal": False}, 0.95 if amx else 0.9
    forward = {"pass": "forward", "dtype": "bfloat16"}
    for dim, length, least in ((64, 512, 1.2), (64, 128, 1.0), (128, 512, 1.05), (128, 128, 0.8)):
        yield f"bfloat16 N {length} D {dim}", {**forward, "length": length, "head_dim": dim, "causal": False}, least
    gradient: Row = {"pass": "with gradient", "length": 2048}
    if amx:
        yield "bfloat16 N 2048", {**forward, "length": 2048, "causal": False}, 1.4
        yield "bfloat16 N 2048 causal", {**forward, "length": 2048, "causal": True}, 1.6
    yield "float32 N 2048 with gradient", {**gradient, "dtype": "float32"}, 1.1
    if amx:
        yield "bfloat16 N 2048 with gradient", {**gradient, "dtype": "bfloat16"}, 1.8


def measure(args: Args) -> dict[str, Any]:
    machine = environment(*SERVICE)
    file = args.out / f"options-{file_name(machine['device'])}.json"
    recorded = json.loads(file.read_text()) if args.only and file.exists() else {}
    rows, when = dict(recorded.get("rows", {})), dict(recorded.get("measured", {}))
    for section in (args.only,) if args.only else SECTIONS:
        when[section] = {name: environment()[name] for name in ("load_average", "commit", "date")}
        rows[section] = rows_of(section, args.rounds, args.runs)
    return {"measured": when, "rows": rows, "targets": targets(rows)}


if __name__ == "__main__":
    run(
        measure,
        "options",
        rounds=Option(5),
        runs=Option(1, "number of runs; each number is their median"),
        only=Option(None, "measure only this section", choices=SECTIONS),
    )
