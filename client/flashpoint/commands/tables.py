"""Results as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from flashpoint.benchmark_schema import NOISY, BenchmarkRow
from flashpoint.verify_schema import VerifyReport

WIDE = 130  # terminal columns for the full table of a benchmark; narrower terminals get fewer table columns
MARKS = {
    "~": f"~ noisy: p20 and p80 are over {NOISY:.0%} of the median apart",
    "!": "! above the measured roof: its data stayed in caches, or something else ran while the peaks were measured",
}


def columns(rows: Sequence[BenchmarkRow], *, wide: bool) -> dict[str, Callable[[BenchmarkRow], str]]:
    """Return, by column title, the function that writes a row's text in that column."""
    # In TFLOP/s the numbers of a CPU would all begin with zeros.
    scale, flops = (1, "TFLOP/s") if max((row.tflops or 0 for row in rows), default=0) >= 1 else (1000, "GFLOP/s")

    def rate(tflops: float | None) -> str:
        return number(None if tflops is None else tflops * scale)

    all_of_them: dict[str, tuple[bool, Callable[[BenchmarkRow], str]]] = {
        "ms": (True, lambda row: f"{'~' if row.noisy else ''}{number(row.ms)}"),
        "p20 – p80": (False, lambda row: f"{number(row.ms_p20)} – {number(row.ms_p80)}"),
        flops: (True, lambda row: rate(row.tflops)),
        "standard": (False, lambda row: rate(row.tflops_standard)),
        "FLOPs": (False, lambda row: count(row.flops)),
        "bytes": (False, lambda row: count(row.bytes)),
        "GB/s": (False, lambda row: number(row.gb_per_s)),
        "FLOP/B": (False, lambda row: number(row.arithmetic_intensity)),
        "% roof": (True, lambda row: f"{'!' if row.above_roof else ''}{number(row.roofline_percent)}"),
        "memory": (True, lambda row: size(row.peak_bytes)),
        "× naive": (True, lambda row: number(row.speedup_over_naive)),
    }
    return {name: write for name, (narrow, write) in all_of_them.items() if narrow or wide}


def benchmark_tables(rows: Iterable[BenchmarkRow], width: int) -> Iterator[Table]:
    """Yield a table for each problem, with a row for each backend. The caption says why backends were skipped."""
    for title, group in groupby(rows, key=problem):
        members = list(group)
        shown = columns(members, wide=width >= WIDE)
        table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
        table.add_column("", min_width=14, no_wrap=True)
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True)
        said = [text for mark, text in MARKS.items() if any(_marked(row, mark) for row in members)]
        for row in members:
            if row.skipped is None:
                table.add_row(row.backend, *(write(row) for write in shown.values()))
            else:
                said.append(f"{row.backend} skipped: {row.skipped}")
        table.caption, table.caption_justify = "\n".join(said) or None, "left"
        yield table


def _marked(row: BenchmarkRow, mark: str) -> bool:
    return row.noisy if mark == "~" else row.above_roof


def problem(row: BenchmarkRow) -> str:
    """Return the problem of a row as text. Rows that differ only in the backend have the same text."""
    sizes = (
        f"B {row.batch}", pair("H", row.q_heads, row.kv_heads), pair("N", row.q_len, row.kv_len),
        pair("D", row.head_dim, row.value_dim),
    )  # fmt: skip
    return f"{row.direction}{', causal' if row.causal else ''} · {row.dtype} · {' '.join(sizes)}"


def verification_table(report: VerifyReport) -> Table:
    """Return a table with a row for each tensor: its errors, torch's error, and the bound."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "max error", "torch's own", "bound", "RMS", "cosine", "worst at", "there", "float64"):
        table.add_column(name, justify="left" if name in ("", "worst at") else "right", no_wrap=True)
    for t in report.tensors:
        table.add_row(
            f"[green]✓[/] {t.name}" if t.ok else f"[bold red]✗ {t.name}[/]",
            f"{t.max_abs:.1e}", f"{t.torch.max_abs:.1e}", f"{t.bound:.1e}", f"{t.rms:.1e}", _cosine(t.cosine),
            ",".join(map(str, t.worst_index)) if t.worst_index is not None else "–",
            number(t.worst_value), number(t.worst_expected),
        )  # fmt: skip
    return table


def pair(name: str, q: int, kv: int) -> str:
    """Return a size of q and the size of k or v, which is left out if it is equal: `H 8/2`, `H 8`."""
    return f"{name} {q}" if q == kv else f"{name} {q}/{kv}"


def number(value: float | None) -> str:
    """Return a number with three digits, or with all digits before the point."""
    if value is None:
        return ""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude < 0.01:
        return f"{value:.1e}"
    return f"{value:.{2 - math.floor(math.log10(magnitude))}f}"


def count(value: float | None) -> str:
    """Return a number with three digits and a factor of thousands: k, M, G, T or P."""
    if value is None:
        return ""
    for unit in ("", " k", " M", " G", " T"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g} P"


def size(count: float | None) -> str:
    """Return a number of bytes in B, KiB, MiB or GiB, so that it has one to four digits."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _cosine(value: float) -> Any:
    """Return a cosine. A value near 1 is written as a difference from 1: `1 − 3e-08`."""
    return f"1 − {1 - value:.0e}" if 0.99 < value < 1 else f"{value:.4g}"
