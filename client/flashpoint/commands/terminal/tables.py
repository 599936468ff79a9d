"""Format results as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from flashpoint_contract.schemas.benchmark import BenchmarkRow
from flashpoint_contract.schemas.verify import VerifyReport
from flashpoint_contract.timing import NOISY

MARKS = {
    "~": f"~ noisy: p20 and p80 are over {NOISY:.0%} of the median apart",
    "*": "* busy: other programs used the cores; measure again when nothing else runs",
    "<": "< memory below what the algorithm must hold: the process reused memory that it already had",
    "!": "! above the measured roof: its data stayed in caches, or something else ran while the peaks were measured",
}
OF_NAIVE = "% roof: of each algorithm's own limit: naive writes the matrix of scores, so its limit is low. Compare ms."

# Columns that are left out on a narrow terminal, in this order.
_DROPPABLE = (
    "standard", "FLOPs", "bytes", "FLOP/B", "GB/s", "p20 – p80", "% roof", "threads", "memory", "TFLOP/s", "GFLOP/s",
)  # fmt: skip
_DROPPABLE_OF_VERIFICATION = ("float64", "there", "RMS", "cosine", "torch's own", " worst at")


def fitting(columns: Mapping[str, Sequence[str]], width: int, droppable: Sequence[str], **more: Any) -> Table:
    """Return a table of text columns by title. Leave out columns of `droppable`, in order, until `width` suffices.

    A title with a space in front is aligned left. `more` are further arguments for `Table`.
    """

    def needed() -> int:
        widths = (max(cell_len(title.lstrip()), *map(cell_len, cells)) for title, cells in shown.items())
        return sum(widths) + 2 * (len(shown) - 1)

    shown = dict(columns)
    for title in droppable:
        if needed() <= width:
            break
        shown.pop(title, None)
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold", caption_justify="left", **more)
    for title in shown:
        table.add_column(title.lstrip(), justify="left" if title.startswith(" ") else "right", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(_coloured, cells))
    return table


def _coloured(cell: str) -> Text:
    return Text(cell, {"✓": "green", "✗": "bold red"}.get(cell[:1], ""))


def columns(rows: Sequence[BenchmarkRow]) -> dict[str, Callable[[BenchmarkRow], str]]:
    """Return the columns by title: each is a function that returns a row's text."""
    # Use GFLOP/s if no row reaches 1 TFLOP/s, as on most CPUs: in TFLOP/s all numbers would begin with zeros.
    scale, flops = (1, "TFLOP/s") if max((row.tflops or 0 for row in rows), default=0) >= 1 else (1000, "GFLOP/s")

    def rate(tflops: float | None) -> str:
        return number(None if tflops is None else tflops * scale)

    writers: dict[str, Callable[[BenchmarkRow], str]] = {
        "ms": lambda row: f"{row.marks}{number(row.ms)}",
        "p20 – p80": lambda row: f"{number(row.ms_p20)} – {number(row.ms_p80)}",
        "threads": lambda row: number(row.threads),
        flops: lambda row: rate(row.tflops),
        "standard": lambda row: rate(row.tflops_standard),
        "FLOPs": lambda row: count(row.flops),
        "bytes": lambda row: count(row.bytes),
        "GB/s": lambda row: number(row.gb_per_s),
        "FLOP/B": lambda row: number(row.arithmetic_intensity),
        "% roof": lambda row: f"{'!' if row.above_roof else ''}{number(row.roofline_percent)}",
        "memory": lambda row: f"{'<' if row.peak_bytes_low else ''}{size(row.peak_bytes)}",
        "× naive": lambda row: number(row.speedup_over_naive),
    }
    if all(row.threads is None for row in rows):
        del writers["threads"]
    return writers


def named_rows(rows: Iterable[BenchmarkRow], kernel: str | None) -> list[BenchmarkRow]:
    """Return the rows, with the backend name "kernel" replaced by the function's name. `kernel` is MODULE:FUNCTION.

    If a backend has the same name as the function, MODULE:FUNCTION replaces "kernel".
    """
    rows = list(rows)
    if kernel is None:
        return rows
    function = kernel.partition(":")[2]
    name = kernel if function in {row.backend for row in rows} - {"kernel"} else function
    return [row.model_copy(update={"backend": name}) if row.backend == "kernel" else row for row in rows]


def benchmark_tables(rows: Iterable[BenchmarkRow], width: int) -> Iterator[Table]:
    """Yield a table for each problem, with a row for each backend. The caption says why backends were skipped."""
    for title, group in groupby(rows, key=problem):
        members = list(group)
        timed = [row for row in members if row.skipped is None]
        texts = {" ": [row.backend for row in timed]}
        texts |= {name: [write(row) for row in timed] for name, write in columns(members).items()}
        notes = [text for mark, text in MARKS.items() if any(_marked(row, mark) for row in members)]
        notes += [f"{row.backend} skipped: {row.skipped}" for row in members if row.skipped is not None]
        yield fitting(texts, width, _DROPPABLE, title=title, caption="\n".join(notes) or None)


def _marked(row: BenchmarkRow, mark: str) -> bool:
    return bool({"!": row.above_roof, "<": row.peak_bytes_low}.get(mark, mark in row.marks))


def machine(environment: Mapping[str, Any]) -> str:
    """Return a line about the machine of a measurement: its device, its threads, and the load when it began."""
    facts = [str(environment.get("device", "the device is not known yet"))]
    if "threads" in environment:
        facts.append(f"{environment['threads']} threads on {environment.get('cores')} cores")
    if load := environment.get("load_average"):
        facts.append(f"load average {' '.join(f'{each:.2f}' for each in load)} at the start")
    return " · ".join(facts)


def problem(row: BenchmarkRow) -> str:
    """Return the problem of a row as text. Rows that differ only in the backend have the same text."""
    sizes = (
        f"B {row.batch}", pair("H", row.q_heads, row.kv_heads), pair("N", row.q_len, row.kv_len),
        pair("D", row.head_dim, row.value_dim),
    )  # fmt: skip
    return f"{row.direction}{', causal' if row.causal else ''} · {row.dtype} · {' '.join(sizes)}"


def verification_table(report: VerifyReport, width: int) -> Table:
    """Return a table with a row for each tensor: its errors, torch's error, and the bound."""
    judged = report.tensors
    columns = {
        " ": [f"{'✓' if t.ok else '✗'} {t.name}" for t in judged],
        "max error": [f"{t.max_abs:.1e}" for t in judged],
        "torch's own": [f"{t.torch.max_abs:.1e}" for t in judged],
        "bound": [f"{t.bound:.1e}" for t in judged],
        "RMS": [f"{t.rms:.1e}" for t in judged],
        "cosine": [_cosine(t.cosine) for t in judged],
        " worst at": ["–" if t.worst_index is None else ",".join(map(str, t.worst_index)) for t in judged],
        "there": [number(t.worst_value) for t in judged],
        "float64": [number(t.worst_expected) for t in judged],
    }
    return fitting(columns, width, _DROPPABLE_OF_VERIFICATION)


def pair(name: str, q: int, kv: int) -> str:
    """Return a size of q and that of k or v, or one number if both are equal: `H 8/2`, `H 8`."""
    return f"{name} {q}" if q == kv else f"{name} {q}/{kv}"


def number(value: float | None) -> str:
    """Return an int with all digits; a float with three digits (two below 0.01), or with all before the point."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
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


def _cosine(value: float) -> str:
    """Return a cosine. A value near 1 is written as a difference from 1: `1 − 3e-08`."""
    return f"1 − {1 - value:.0e}" if 0.99 < value < 1 else f"{value:.4g}"
