"""A whole grid, case by case: the events that a command line draws and a server streams."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from flashpoint_kernels.timing.case import Case, Timing
from flashpoint_kernels.timing.clock import Slices
from flashpoint_kernels.timing.environment import describe
from flashpoint_kernels.timing.measurement import measure
from flashpoint_kernels.timing.peaks import find_peaks, peak_of


def run_grid(
    cases: Sequence[Case], device: str = "cpu", timing: Timing | None = None
) -> Generator[dict[str, Any], None, None]:
    """Time `cases` on `device`, with a yield after every slice of `timing.slice_ms`; the events are the package's.

    Rows come in the order of the cases, but problem by problem, and `naive` first in each.
    """
    timing = timing or Timing()
    total = len(cases)

    def progress(done: int, backend: str | None, slice_ms: float) -> dict[str, Any]:
        return {"type": "progress", "done": done, "total": total, "backend": backend, "slice_ms": slice_ms}

    dtypes = dict.fromkeys(case.dtype for case in cases)
    for dtype in dtypes:
        for slice_ms in find_peaks(device, dtype, Slices(timing.slice_ms)):
            yield progress(0, None, slice_ms)
    peaks = {dtype: peak_of(device, dtype)._asdict() for dtype in dtypes}
    yield {"type": "device", "environment": describe(device) | {"peaks": peaks}}
    naive_ms: dict[tuple[Any, ...], float | None] = {}
    for done, case in enumerate(_in_order(cases)):
        running = measure(case, device, timing, naive_ms=naive_ms.get(case.problem))
        while True:
            try:
                slice_ms = next(running)
            except StopIteration as end:
                row = end.value
                break
            yield progress(done, case.backend, slice_ms)
        if case.backend == "naive":
            naive_ms[case.problem] = row["ms"]
        yield {"type": "row", "done": done + 1, "total": total, "row": row}


def _in_order(cases: Sequence[Case]) -> list[Case]:
    first = {case.problem: number for number, case in reversed(list(enumerate(cases)))}
    return sorted(cases, key=lambda case: (first[case.problem], case.backend != "naive"))
