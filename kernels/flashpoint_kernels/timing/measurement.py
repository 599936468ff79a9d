"""One case timed, and a whole grid: generators that give the device back after every slice.

A slice ends when `slice_ms` have passed, between two calls: a single call cannot be split, and the longest slice is in
the row. Other work in a pause leaves the caches cold, so a short call is made once unseen before it is timed again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from statistics import median, quantiles
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.own_kernel import Kernel
from flashpoint_kernels.problem import DTYPES
from flashpoint_kernels.timing.case import (
    ALGORITHMS,
    ROW_FIELDS,
    Case,
    Timing,
    flops,
    moved_bytes,
    pairs,
    standard_flops,
)
from flashpoint_kernels.timing.clock import Slices, available_bytes, clock_of, peak_bytes, uncertainty
from flashpoint_kernels.timing.device import describe, device_name, find_peaks, is_lost, peak_of
from flashpoint_kernels.timing.implementations import CannotRunError, Implementation, algorithms, implementation_of

# A call this many times shorter than a slice is repeated unseen after a pause, which costs so much of it at most.
_SHORT = 4
_LOOK_SECONDS = 0.005  # between two looks at a call that is made aside

Row = dict[str, Any]


class DeviceLostError(RuntimeError):
    """Nothing works on the GPU any more in this process; `row` is of the case that it was lost in, without figures."""

    def __init__(self, row: Row) -> None:
        super().__init__(f"the CUDA device is lost: {row['skipped']}")
        self.row = row


def measure(
    case: Case, device: str = "cpu", timing: Timing | None = None, *, naive_ms: float | None = None,
    kernel: Kernel | None = None,
) -> Generator[float, None, Row]:  # fmt: skip
    """Time `case` on `device` ("cpu", "cuda", "cuda:1"): yields each slice's milliseconds, and returns the row.

    The row's keys are `ROW_FIELDS`: the case; `ms`, the median, `ms_p20` and `ms_p80` of `repeats` calls; `flops` and
    `bytes`, the algorithm's own by `case`, `flops_standard`, and their rates in TFLOP/s and GB/s (1e9 bytes);
    `arithmetic_intensity` in flops a byte; `roofline_percent`, of what the measured peaks allow at that intensity;
    `peak_bytes` beyond the inputs, what a forward keeps for the backward among them; `speedup_over_naive`, from the
    `naive_ms` of the same problem; `longest_slice_ms`. A time above the roof is measured again, and the longer of
    the two counts: its data was still in caches, or the peaks were disturbed. For a problem that cannot run `skipped`
    is the reason, and figures are None. Raises DeviceLostError where the device is gone after it, for then nothing else
    can be measured.

    `kernel` is the caller's own function, which a case of backend `kernel` times. Its FLOPs and bytes are counted as
    FlashAttention's.
    """
    timing = timing or Timing()
    row: Row = dict.fromkeys(ROW_FIELDS)
    row |= {name: getattr(case, name) for name in ROW_FIELDS if hasattr(case, name)}
    row["device"] = device_name(device)
    slices = Slices(timing.slice_ms)
    try:
        implementation = implementation_of(case, kernel)
        row["version"] = implementation.version()
        samples, row["peak_bytes"] = yield from _timed(case, implementation, device, timing, slices)
        yield from find_peaks(device, case.dtype, slices)
        if _rates(case, device, median(samples))["roofline_percent"] > 100:
            again, _ = yield from _timed(case, implementation, device, timing, slices)
            samples = max(samples, again, key=median)
    except Exception as error:  # a peer may raise anything; the next case is another matter
        row["skipped"] = str(error) if isinstance(error, CannotRunError) else _brief(f"{type(error).__name__}: {error}")
        if is_lost(device):
            raise DeviceLostError(row) from error
        return row
    finally:
        if torch.device(device).type == "cuda":
            with suppress(RuntimeError):  # the device may be lost
                torch.cuda.empty_cache()  # the case's memory is free for other requests
    slices.end()
    row |= {"longest_slice_ms": slices.longest_ms, "repeats": len(samples), "ms": median(samples)}
    row["ms_p20"], *_, row["ms_p80"] = quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else samples * 2
    return row | _rates(case, device, row["ms"]) | {"speedup_over_naive": naive_ms and naive_ms / row["ms"]}


def _timed(
    case: Case, implementation: Implementation, device: str, timing: Timing, slices: Slices
) -> Generator[float, None, tuple[list[float], int | None]]:
    """(milliseconds of each call, peak bytes); a backward's peak is that of its forward and itself."""
    attend = implementation.make(case, device)
    _check_memory(case, device)
    q, k, v, do = yield from _inputs(case, device, implementation.layout, slices)
    leaves = [t.requires_grad_(case.direction != "forward") for t in (q, k, v)]

    def whole() -> Any:
        o = attend(*leaves)
        return o if case.direction == "forward" else torch.autograd.grad(o, leaves, do)

    if device.startswith("cuda"):
        yield from aside(partial(_first, whole, device), slices)
    else:
        _first(whole, device)
    yield slices.end()
    slices.begin()
    peak = peak_bytes(whole, device)
    warm_ms = slices.spent_ms
    yield slices.end()
    slices.begin()
    call: Callable[[], Any] = whole
    if case.direction == "backward":
        o = attend(*leaves)
        call = partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    clock = clock_of(device)

    def repeated(enough: Callable[[list[float]], bool]) -> Generator[float, None, list[float]]:
        samples: list[float] = []
        cost_ms = math.inf  # what a call costs of a slice, the clock's own work included
        while not enough(samples):
            if slices.spent_ms + cost_ms > slices.slice_ms:
                yield slices.end()
                slices.begin()
                if cost_ms * _SHORT < slices.slice_ms:
                    call()
            before, room = slices.spent_ms, slices.slice_ms - slices.spent_ms
            repeats = max(1, min(int(room / cost_ms), timing.max_repeats - len(samples)))
            samples += clock.time(call, repeats)
            cost_ms = (slices.spent_ms - before) / repeats
        return samples

    def precise(samples: list[float]) -> bool:
        if len(samples) < timing.min_repeats:
            return False
        late = slices.total_ms - began >= timing.max_seconds * 1e3 or len(samples) >= timing.max_repeats
        return late or uncertainty(samples) <= timing.precision

    yield from repeated(lambda samples: warm_ms + sum(samples) >= timing.warmup_ms)
    began = slices.total_ms
    return (yield from repeated(precise)), peak


def _inputs(case: Case, device: str, layout: str, slices: Slices) -> Generator[float, None, list[Tensor]]:
    """q, k, v, do: the same numbers whatever the implementation; a yield after each."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for heads, rows, dim in (
        (case.q_heads, case.q_len, case.head_dim),
        (case.kv_heads, case.kv_len, case.head_dim),
        (case.kv_heads, case.kv_len, case.value_dim),
        (case.q_heads, case.q_len, case.value_dim),
    ):
        shape = (case.batch, heads, rows, dim)
        t = torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])
        made.append(t if layout == "bhsd" else t.transpose(1, 2).contiguous())
        yield slices.end()
        slices.begin()
    return made


def _check_memory(case: Case, device: str) -> None:
    """Refuse what a CPU's memory cannot hold: where a GPU raises, the system would end a process."""
    if not device.startswith("cpu") or not any(ALGORITHMS[name].matrix_passes for name in algorithms(case)):
        return
    # S and P, backward also dP and dS, each perhaps in float32 on the way.
    needed = pairs(case) * 4 * (2 if case.direction == "forward" else 4)
    available = available_bytes()
    if needed > available:
        raise CannotRunError(f"needs about {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are available")


def aside(call: Callable[[], Any], slices: Slices) -> Generator[float, None, None]:
    """Make a call in a thread of its own, and give the device back meanwhile: compilers take seconds, or a minute.

    Raises what it raises. Nobody waits for its end where this is closed before.
    """
    ended: Future[None] = Future()

    def work() -> None:
        try:
            call()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    Thread(target=work, name="flashpoint-first", daemon=True).start()
    while wait([ended], _LOOK_SECONDS).not_done:
        yield slices.end()
        slices.begin()
    ended.result()


def _first(call: Callable[[], Any], device: str) -> None:
    """The first call, in which kernels are compiled, and which fails where there are none."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if device.startswith("cuda"):
                with torch.cuda.device(device):  # each thread begins with the first
                    call()
                    torch.cuda.synchronize()
            else:
                call()
        except RuntimeError as error:
            # torch says in warnings why none of its kernels would do.
            reasons = [str(w.message) for w in said if w.category is UserWarning]
            raise CannotRunError(" ".join(dict.fromkeys(_brief(text) for text in [str(error), *reasons]))) from error


def _brief(text: str) -> str:
    """Two lines: compilers say where they failed in the first, and how in the second."""
    return " ".join(line.strip() for line in text.strip().splitlines()[:2])


def _rates(case: Case, device: str, ms: float) -> Row:
    done = sum(flops(name, case) for name in algorithms(case))
    moved = sum(moved_bytes(name, case) for name in algorithms(case))
    standard = standard_flops(case)
    peak = peak_of(device, case.dtype)
    least_ms = max(done / peak.tflops / 1e9, moved / peak.gb_per_s / 1e6)
    return {
        "flops": done, "tflops": done / ms / 1e9,
        "flops_standard": standard, "tflops_standard": standard / ms / 1e9,
        "bytes": moved, "gb_per_s": moved / ms / 1e6,
        "arithmetic_intensity": done / moved, "roofline_percent": 100 * least_ms / ms,
    }  # fmt: skip


def run_grid(
    cases: Sequence[Case], device: str = "cpu", timing: Timing | None = None, kernel: Kernel | None = None
) -> Generator[dict[str, Any], None, None]:
    """Time `cases` on `device`, with a yield after every slice of `timing.slice_ms`; the events are the package's.

    `kernel` is as in `measure`.

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
        running = measure(case, device, timing, naive_ms=naive_ms.get(case.problem), kernel=kernel)
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
