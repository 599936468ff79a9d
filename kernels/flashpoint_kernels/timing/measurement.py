"""Time one case, or a whole grid: generators that release the device after every slice.

A slice ends after `slice_ms`, between two calls: a single call cannot be split, and the row contains the longest slice.
Other work during a pause leaves cold caches, so a short call runs once unmeasured before timing continues.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_kernels.timing.case import (
    ALGORITHMS,
    OWN,
    ROW_FIELDS,
    Case,
    Timing,
    flops,
    held_bytes,
    moved_bytes,
    pairs,
    standard_flops,
)
from flashpoint_kernels.timing.checking import OURS, Turns, WrongAnswerError, compare, possible
from flashpoint_kernels.timing.clock import Slices, available_bytes, clock_of, peak_bytes, uncertainty
from flashpoint_kernels.timing.device import describe, device_name, find_peaks, is_lost, peak_of
from flashpoint_kernels.timing.implementations import (
    Attend,
    CannotRunError,
    Implementation,
    algorithms,
    implementation_of,
)
from flashpoint_kernels.timing.own_kernel import Kernel

# A call that takes less than 1/_SHORT of a slice runs once unmeasured after a pause. So this run costs at most 1/_SHORT
# of a slice.
_SHORT = 4
_LOOK_SECONDS = 0.005  # seconds between two checks of a call in another thread

BUSY = 0.05  # a figure is disturbed if threads wait for a core for more than this share of the time
# Other programs delayed a call on all threads if it takes this much longer (milliseconds), and this many times longer,
# than on fewer threads: to start threads takes microseconds, but to wait for a busy core takes milliseconds.
_HELD_UP_MS, _HELD_UP = 1.0, 2.0
_NOISE = 0.05  # two measurements of one call may differ by this much on a quiet machine
_AGAIN = 3  # number of further measurements if the memory is below the algorithm's minimum

Row = dict[str, Any]


class DeviceLostError(RuntimeError):
    """The GPU does not work any more in this process.

    `row` is the row, without figures, of the case in which the GPU failed.
    """

    def __init__(self, row: Row) -> None:
        super().__init__(f"the CUDA device is lost: {row['skipped']}")
        self.row = row


def measure(
    case: Case, device: str = "cpu", timing: Timing | None = None, *, naive_ms: float | None = None,
    kernel: Kernel | None = None,
) -> Generator[float, None, Row]:  # fmt: skip
    """Time `case` on `device` ("cpu", "cuda", "cuda:1"): yields each slice's milliseconds, and returns the row.

    The row's keys are `ROW_FIELDS`: the case; `ms`, the median, and `ms_p20` and `ms_p80` of `repeats` calls; `flops`
    and `bytes` of the algorithm (see `case`), `flops_standard`, and their rates in TFLOP/s and GB/s (1e9 bytes);
    `arithmetic_intensity` in flops a byte; `roofline_percent` of the speed that the measured peaks allow at this
    intensity; `peak_bytes` beyond the inputs, including what a forward keeps for the backward; `speedup_over_naive`,
    from `naive_ms` of the same problem; `longest_slice_ms`. A case above the roofline is measured again, and the longer
    of the two times counts: data was still in caches, or the peaks were disturbed. On the CPU, `threads` is the number
    of threads with which calls were fastest by more than the noise, `ms_by_threads` has the medians of all numbers that
    were tried, `waited` is the share of the time for which threads waited for a core, and `busy` says that other
    programs disturbed the measurement. `peak_bytes_low`: the memory is below what the algorithm must hold, also after
    further attempts. If a case cannot run, `skipped` is the reason, and figures are None. Raises DeviceLostError if the
    device is lost, because nothing else can be measured then.

    `kernel` is the caller's own function, which a case of backend `kernel` times. Its FLOPs and bytes are counted like
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
        timed = yield from _timed(case, implementation, device, timing, slices)
        yield from find_peaks(device, case.dtype, slices)
        if _rates(case, device, median(timed.samples))["roofline_percent"] > 100:
            again = yield from _timed(case, implementation, device, timing, slices)
            timed = max(timed, again, key=lambda one: median(one.samples))
        if case.backend == OWN:
            peak = peak_of(device, case.dtype)
            possible(_rates(case, device, median(timed.samples))["tflops"], peak.tflops, peak.sheet_tflops)
    except Exception as error:  # other libraries may raise anything, and the next case can still run
        said = f"wrong: {error}" if isinstance(error, WrongAnswerError) else str(error)
        known = isinstance(error, (CannotRunError, WrongAnswerError))
        row["skipped"] = said if known else _brief(f"{type(error).__name__}: {error}")
        if is_lost(device):
            raise DeviceLostError(row) from error
        return row
    finally:
        if torch.device(device).type == "cuda":
            try:
                torch.cuda.empty_cache()  # free the case's memory for other requests
            except RuntimeError as error:  # the device may be lost
                row["skipped"] = row["skipped"] or _brief(f"{type(error).__name__}: {error}")
    if row["skipped"] is not None:
        return row
    slices.end()
    samples = timed.samples
    row |= {"longest_slice_ms": slices.longest_ms, "repeats": len(samples), "ms": median(samples)} | timed.about()
    row["ms_p20"], *_, row["ms_p80"] = quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else samples * 2
    return row | _rates(case, device, row["ms"]) | {"speedup_over_naive": naive_ms and naive_ms / row["ms"]}


@dataclass
class _Timed:
    """The measurements of a case: milliseconds of each call (`samples`), and the conditions of these calls.

    `peak` is the peak memory in bytes; that of a backward includes its forward's.
    """

    samples: list[float]
    peak: int | None
    low: bool  # whether the peak is below the memory that the algorithm must hold
    threads: int | None = None  # number of threads for the samples; None on a GPU
    by_threads: dict[int, float] | None = None  # the medians for each tested number of threads
    waited: float | None = None  # the largest share of the time that threads waited for a core

    @property
    def busy(self) -> bool:
        """Whether other programs disturbed the time: threads waited, or all threads took far longer than fewer did."""
        held_up = False
        if self.by_threads:
            ms_of_all = self.by_threads[max(self.by_threads)]
            shortest = min(self.by_threads.values())
            held_up = ms_of_all - shortest > _HELD_UP_MS and ms_of_all > _HELD_UP * shortest
        return held_up or (self.waited or 0.0) > BUSY

    def about(self) -> Row:
        """Return the fields of a row that describe these times."""
        by_threads = None if self.by_threads is None else {str(n): self.by_threads[n] for n in sorted(self.by_threads)}
        return {
            "threads": self.threads, "ms_by_threads": by_threads, "waited": self.waited, "busy": self.busy,
            "peak_bytes": self.peak, "peak_bytes_low": self.low,
        }  # fmt: skip


def _timed(
    case: Case, implementation: Implementation, device: str, timing: Timing, slices: Slices
) -> Generator[float, None, _Timed]:
    """Time a case. On the CPU, also try fewer threads: OpenMP waits for its slowest thread, so they may be faster."""
    attend = implementation.make(case, device)
    _check_memory(case, device)
    turns = Turns(case, device) if case.backend == OWN else None
    if turns is None:
        q, k, v, do = yield from _inputs(case, device, implementation.layout, slices)
        leaves = [t.requires_grad_(case.direction != "forward") for t in (q, k, v)]
    else:
        leaves, do = turns.leaves, turns.do

    def whole() -> Any:
        o = attend(*leaves)
        return o if case.direction == "forward" else torch.autograd.grad(o, leaves, turns.do if turns else do)

    if device.startswith("cuda"):
        yield from aside(partial(_first, whole, device), slices)
    else:
        _first(whole, device)
    yield from slices.pause()
    peak, held = peak_bytes(whole, device), held_bytes(algorithms(case), case)
    for _ in range(_AGAIN):
        if peak is None or peak >= held:
            break
        yield from slices.pause()
        peak = max(peak, peak_bytes(whole, device) or 0)
    low = peak is not None and peak < held
    warm_ms = slices.spent_ms
    yield from slices.pause()
    if case.backend in OURS:
        answer = whole()
        listed = answer if case.direction != "forward" else (answer,)
        compare(case, [t.detach() for t in (*leaves, do)], [t.detach() for t in listed], random.Random(0))
        yield from slices.pause()
    call, prepare, keep = whole, _nothing, _nothing
    if case.direction == "backward" and turns is None:
        o = attend(*leaves)
        call = partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    elif turns is not None:
        call, prepare, keep = _by_turns(case, turns, attend, whole)
    clock = clock_of(device)

    def repeated(enough: Callable[[list[float]], bool]) -> Generator[float, None, list[float]]:
        samples: list[float] = []
        cost_ms = math.inf  # time of a call in a slice, including the clock's own work
        while not enough(samples):
            if slices.spent_ms + cost_ms > slices.slice_ms:
                yield from slices.pause()
                if cost_ms * _SHORT < slices.slice_ms:
                    prepare()
                    call()
            before, room = slices.spent_ms, slices.slice_ms - slices.spent_ms
            repeats = max(1, min(int(room / cost_ms), timing.max_repeats - len(samples)))
            samples += clock.time(call, repeats, prepare, keep)
            cost_ms = (slices.spent_ms - before) / repeats
        return samples

    def precise(samples: list[float]) -> bool:
        if len(samples) < timing.min_repeats:
            return False
        late = slices.total_ms - began >= timing.max_seconds * 1e3 or len(samples) >= timing.max_repeats
        return late or uncertainty(samples) <= timing.precision

    yield from repeated(lambda samples: warm_ms + sum(samples) >= timing.warmup_ms)
    if device.startswith("cuda"):
        began = slices.total_ms
        samples = yield from repeated(precise)
        if turns is not None:
            turns.check()
        return _Timed(samples, peak, low)
    times: dict[int, list[float]] = {}
    waited: list[float] = []
    every = torch.get_num_threads()
    count: int | None = every
    while count:
        with slices.with_threads(count) as waits:
            began = slices.total_ms
            if times:
                prepare()
                call()  # not timed: the first call with another number of threads starts these threads
                times[count] = yield from repeated(lambda samples: len(samples) >= timing.min_repeats)
            if count == every or median(times[count]) < median(times[every]):
                times[count] = yield from repeated(precise)
        waited += [] if waits.share is None else [waits.share]
        count = _fewer({number: median(ms) for number, ms in times.items()}, timing)
    if turns is not None:
        turns.check()
    best = every
    for count in times:
        if _faster(times[count], times[best]):
            best = count
    by_threads = {number: median(ms) for number, ms in times.items()}
    return _Timed(times[best], peak, low, best, by_threads, max(waited, default=None))


def _by_turns(
    case: Case, turns: Turns, attend: Attend, whole: Callable[[], Any]
) -> tuple[Callable[[], Any], Callable[[], None], Callable[[Any], None]]:
    """Return a call with fresh inputs, what runs before it, and what runs with its answer."""
    if case.direction != "backward":
        return whole, turns.fresh, turns.keep
    o: list[Tensor] = []

    def before() -> None:
        turns.fresh()
        o[:] = [attend(*turns.leaves)]

    return lambda: torch.autograd.grad(o, turns.leaves, turns.do), before, turns.keep


def _nothing(*_: Any) -> None:
    pass


def _fewer(ms: dict[int, float], timing: Timing) -> int | None:
    """Return the number of threads to try next; None if no other number is useful.

    `ms` has the median for each number that was tried; the largest number was tried first. Try one thread if a call
    would then take about a slice at most, else half of the threads as long as fewer threads are faster.
    """
    every = max(ms)
    if every == 1 or ms[every] > timing.max_seconds * 1e3:
        return None
    if 1 not in ms and len(ms) == 1 and (every == 2 or every * ms[every] <= 2 * timing.slice_ms):
        return 1
    halves = [count for count in ms if count > 1]
    half = min(halves) // 2
    if half < 1 or half in ms or ms[min(halves)] > ms[every]:
        return None
    return half


def _faster(one: list[float], other: list[float]) -> bool:
    """Return whether the median of `one` is less than that of `other` by more than its uncertainty and `_NOISE`."""
    return median(one) * (1 + uncertainty(one)) < median(other) * (1 - _NOISE)


def _inputs(case: Case, device: str, layout: str, slices: Slices) -> Generator[float, None, list[Tensor]]:
    """Return q, k, v, do with the same numbers for all implementations; yields after each."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for heads, rows, dim in (
        (case.q_heads, case.q_len, case.head_dim),
        (case.kv_heads, case.kv_len, case.head_dim),
        (case.kv_heads, case.kv_len, case.value_dim),
        (case.q_heads, case.q_len, case.value_dim),
    ):
        shape = (case.batch, heads, rows, dim)
        t = torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(DTYPES[case.dtype])
        made.append(t if layout == "bhsd" else t.transpose(1, 2).contiguous())
        yield from slices.pause()
    return made


def _check_memory(case: Case, device: str) -> None:
    """Raise CannotRunError if naive attention needs more memory than the CPU has: the system would kill the process."""
    if not device.startswith("cpu") or not any(ALGORITHMS[name].matrix_passes for name in algorithms(case)):
        return
    # Naive attention holds S and P, in the backward also dP and dS, each possibly in float32.
    needed = pairs(case) * 4 * (2 if case.direction == "forward" else 4)
    available = available_bytes()
    if needed > available:
        raise CannotRunError(f"needs about {needed / 2**30:.1f} GiB, but {available / 2**30:.1f} GiB are available")


def aside(call: Callable[[], Any], slices: Slices) -> Generator[float, None, None]:
    """Run a call in another thread, and yield until it ends: a call that compiles takes seconds, or a minute.

    Raises the call's error. If the generator is closed earlier, the thread goes on, and nothing waits for it.
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
        yield from slices.pause()
    ended.result()


def _first(call: Callable[[], Any], device: str) -> None:
    """Make the first call, which compiles kernels. Raises CannotRunError if it raises RuntimeError."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if device.startswith("cuda"):
                with torch.cuda.device(device):  # each thread starts with device 0
                    call()
                    torch.cuda.synchronize()
            else:
                call()
        except RuntimeError as error:
            # torch explains in warnings why it cannot use its kernels.
            reasons = [str(w.message) for w in said if w.category is UserWarning]
            raise CannotRunError(" ".join(dict.fromkeys(_brief(text) for text in [str(error), *reasons]))) from error


def _brief(text: str) -> str:
    """Return the first two lines of an error: compilers say in the first where they failed, and in the second why."""
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
    """Time `cases` on `device`, with a yield after every slice of `timing.slice_ms`.

    Yields the events that the package `flashpoint_kernels.timing` lists. `kernel` is as in `measure`. Rows come in the
    order of the cases, but problem by problem, with `naive` first.
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
