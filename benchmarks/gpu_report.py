"""What `make gpu` plans and what it makes of its measurements: plain data in, plain data, text and a picture out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from flashpoint_kernels.timing.case import Case, CaseDirection
from flashpoint_kernels.triton_backend.configurations import Tile

Row = dict[str, Any]

TOKENS, WIDTH = 16384, 2048  # batch·seq and heads·D of the grid that FlashAttention 2 and 3 publish
DIMS = (64, 128, 256)
SEQS = tuple(512 << n for n in range(6))
PEERS = (  # in the order in which they are timed: what levels are about first, what takes longest to compile last
    ("sdpa_flash", "sdpa_cudnn"),
    ("flash_attn", "flash_attn_3", "flashinfer", "xformers"),
    ("sdpa_efficient", "sdpa_math"),
    ("flex",),
)
PASSES: tuple[CaseDirection, ...] = ("forward", "backward")
MATH_TOKENS = 4096  # beyond, the scores of SDPA's math alone would not fit

# What may be proposed for each kernel, by queries × keys; warps and stages are tried with each, or stages alone where
# warps have roles.
SWEEP = {
    "forward": ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32)),
    "backward_kv": ((64, 128), (64, 64), (32, 128), (128, 64), (32, 64)),
    "backward_q": ((128, 64), (128, 128), (64, 64), (128, 32), (64, 32)),
    "forward_hopper": ((128, 128), (128, 64)),
    "backward_kv_hopper": ((64, 128), (32, 128)),
    "backward_q_hopper": ((128, 128), (128, 64)),
}


def timing_cases() -> list[Case]:
    """Forward and backward, D 64, 128 and 256, causal and not, 512 to 16k; at D 128 also with eight heads a key."""
    cases = []
    for direction, dim, causal, group, seq in product(PASSES, DIMS, (False, True), (1, 8), SEQS):
        if group > 1 and dim != 128:
            continue
        for backend in ("triton", *chain(*PEERS)):
            if backend != "sdpa_math" or seq <= MATH_TOKENS:
                cases.append(
                    Case(
                        backend=backend, batch=TOKENS // seq, q_heads=WIDTH // dim, kv_heads=WIDTH // dim // group,
                        q_len=seq, head_dim=dim, causal=causal, direction=direction,
                    )
                )  # fmt: skip
    return cases


class Pass(NamedTuple):
    """Cases to time together: with torch asked to be `deterministic`, or us to take the path for Hopper."""

    cases: list[Case]
    deterministic: bool = False
    hopper: bool = False


def passes(hopper: bool) -> list[Pass]:
    """All that is timed; `hopper`: on a device that can take that path. What is cut off has the most telling first."""
    cases = timing_cases()

    def of(*backends: str) -> list[Case]:
        return [case for case in cases if case.backend in backends]

    first, *others = PEERS
    return [
        Pass(of("triton", *first)),
        Pass([case for case in of("sdpa_flash") if case.direction == "backward"], deterministic=True),
        *([Pass(of("triton"), hopper=True)] if hopper else []),
        *(Pass(of(*backends)) for backends in others),
    ]


def of_hopper(kernel: str) -> bool:
    return kernel.endswith("_hopper")


def candidates(kernel: str) -> list[Tile]:
    warps, stages = ((4,), (2, 3, 4)) if of_hopper(kernel) else ((4, 8), (1, 2, 3))
    return [Tile(m, n, w, deep) for (m, n), w, deep in product(SWEEP[kernel], warps, stages)]


def point(row: Row) -> tuple[Any, ...]:
    """What rows have in common that may be compared."""
    names = ("direction", "dtype", "head_dim", "causal", "q_heads", "kv_heads", "q_len")
    return tuple(row[name] for name in names)


def name_of(row: Row) -> str:
    """A peer that ran deterministically is a peer of its own, and so are we on the path for Hopper."""
    more = [name for name in ("deterministic", "hopper") if row.get(name)]
    return " ".join([row["backend"], *more])


def key(row: Row) -> tuple[Any, ...]:
    """What one row of the table measured."""
    return *point(row), name_of(row)


def ratios(rows: Iterable[Row], ours: str = "triton") -> dict[str, dict[str, float]]:
    """How many times as fast as each peer we are, by direction: geometric mean, worst point, and how many points."""
    timed = [row for row in rows if row["ms"] is not None]
    our_ms = {point(row): row["ms"] for row in timed if name_of(row) == ours}
    found: dict[str, list[float]] = {}
    for row in timed:
        if name_of(row) != ours and point(row) in our_ms:
            found.setdefault(f"{row['direction']} {name_of(row)}", []).append(row["ms"] / our_ms[point(row)])
    return {
        name: {"mean": math.exp(sum(map(math.log, each)) / len(each)), "worst": min(each), "points": len(each)}
        for name, each in sorted(found.items())
    }


def levels(found: dict[str, dict[str, float]]) -> dict[str, str]:
    """The highest level reached in each direction: none, floor, goal or stretch; "not measured" without its peers.

    Floor: as fast as SDPA's flash (FlashAttention 2), the forward at every point, the backward, which is deterministic,
    as that is when deterministic. Goal: 0.9 of cuDNN's forward, 0.75 of its backward. Stretch: as fast as cuDNN, and as
    FlashAttention 3 where that was timed.
    """

    def level(direction: str, floor: float | None, goal: float) -> str:
        means = [found[n]["mean"] for n in (f"{direction} sdpa_cudnn", f"{direction} flash_attn_3") if n in found]
        if floor is None or f"{direction} sdpa_cudnn" not in found:
            return "not measured"
        if floor < 1:
            return "none"
        return "floor" if means[0] < goal else "goal" if min(means) < 1 else "stretch"

    flash = found.get("forward sdpa_flash", {}).get("worst")
    deterministic = found.get("backward sdpa_flash deterministic", {}).get("mean")
    return {"forward": level("forward", flash, 0.9), "backward": level("backward", deterministic, 0.75)}


def proposal(trials: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """The fastest trial of each kernel and head dimension, and what the shipped tile took beside it."""
    best: dict[str, dict[int, Row]] = {}
    for trial in trials:
        if trial["ms"] is None:
            continue
        by_dim = best.setdefault(trial["kernel"], {})
        before = by_dim.get(trial["head_dim"])
        shipped = trial["ms"] if trial["shipped"] else before and before["shipped_ms"]
        if before is None or trial["ms"] < before["ms"]:
            by_dim[trial["head_dim"]] = {**trial, "shipped_ms": shipped}
        else:
            before["shipped_ms"] = shipped
    return best


def configuration(best: dict[str, dict[int, Row]]) -> str:
    """The proposed tiles as lines of configurations.py, for the head dimensions of which every kernel was timed.

    Of the path for Hopper, which has not every kernel at every head dimension, for those of which one was.
    """

    def tile(kernel: str, dim: int) -> str:
        return "Tile({block_m}, {block_n}, {num_warps}, {num_stages})".format(**best[kernel][dim])

    general = [kernel for kernel in SWEEP if not of_hopper(kernel)]
    lines = [
        f"{dim}: Config({', '.join(tile(kernel, dim) for kernel in general)}),"
        for dim in DIMS
        if all(dim in best.get(kernel, {}) for kernel in general)
    ]
    for dim in DIMS:
        timed = [kernel for kernel in SWEEP if of_hopper(kernel) and dim in best.get(kernel, {})]
        if timed:
            tiles = ", ".join(f'"{kernel.removesuffix("_hopper")}": {tile(kernel, dim)}' for kernel in timed)
            lines.append(f"{dim}: {{{tiles}}},")
    return "\n".join(lines)


def plot(rows: Sequence[Row], device: str, path: Path) -> None:
    """TFLOP/s (as all papers count them) against length: a panel a direction, head dimension and mask."""
    from matplotlib.figure import Figure

    def panel(row: Row) -> tuple[bool, bool, int]:
        return row["direction"] != "forward", row["causal"], row["head_dim"]

    timed = [row for row in rows if row["ms"] is not None and row["q_heads"] == row["kv_heads"]]
    panels = sorted({panel(row) for row in timed})
    columns = len(DIMS)
    lines = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(4.5 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for at, (backward, causal, dim) in zip(axes.flat, panels, strict=False):
        here = [row for row in timed if panel(row) == (backward, causal, dim)]
        for name in dict.fromkeys(map(name_of, here)):
            x, y = zip(*sorted((r["q_len"], r["tflops_standard"]) for r in here if name_of(r) == name), strict=True)
            at.plot(x, y, marker="o", markersize=3, linewidth=2.2 if name.startswith("triton") else 1, label=name)
        at.set_xscale("log", base=2)
        at.set_ylim(bottom=0)
        at.set_title(f"{'backward' if backward else 'forward'}, D {dim}{', causal' if causal else ''}", fontsize=9)
        at.set_xlabel("length")
        at.set_ylabel("TFLOP/s")
    if panels:
        axes.flat[0].legend(fontsize=7)
    for at in axes.flat[len(panels) :]:
        at.axis("off")
    figure.suptitle(f"{device}, bfloat16")
    figure.savefig(path)
