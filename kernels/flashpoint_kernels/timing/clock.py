"""Measure the time and the memory of calls.

On the CPU, a monotonic clock times each call. On a GPU, CUDA events time each call, after a flush of the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any, Protocol

import torch

from flashpoint_kernels.judging.process import trim


def _nothing(*_: Any) -> None:
    pass


class Clock(Protocol):
    @property
    def with_host(self) -> bool:
        """Whether the times of the last calls include the host's time to launch them on the GPU."""

    def time(
        self, call: Callable[[], Any], repeats: int, before: Callable[[], None] = _nothing,
        after: Callable[[Any], None] = _nothing,
    ) -> list[float]:  # fmt: skip
        """Return the milliseconds of each of `repeats` calls. All calls have ended when it returns.

        `before` runs before each call, and `after` with its answer, both outside of the measured time.
        """


class CpuClock:
    with_host = False  # no GPU: the time of a call has no separate part for the host

    def time(
        self, call: Callable[[], Any], repeats: int, before: Callable[[], None] = _nothing,
        after: Callable[[Any], None] = _nothing,
    ) -> list[float]:  # fmt: skip
        taken = []
        for _ in range(repeats):
            before()
            start = perf_counter_ns()
            answer = call()
            taken.append((perf_counter_ns() - start) / 1e6)
            after(answer)
            del answer  # free it outside the measured time, because a real caller would keep the answer
        return taken


_CYCLES_PER_MS = 2_000_000  # at 2 GHz, the maximum of an H100: a slower clock makes the pause longer
_FIRST_PAUSE_MS = 0.5  # torch enqueues one operator in a tenth of this time
_LONGEST_PAUSE_MS = 32.0


class CudaClock:
    """Times calls on a GPU, queued one after another, each after a write to the whole L2 cache and a pause on the GPU.

    Events record when the GPU reaches them. During the pause, the host enqueues the whole call, so the GPU never waits
    for Python inside it. If the GPU starts a call before the host has enqueued it, the call is repeated after a pause
    of twice the host's time. If a pause of `_LONGEST_PAUSE_MS` is not enough, the call itself waits for the device, or
    makes more launches than the device can queue: then it is timed without a pause, and includes the host's time.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        # Twice the cache's size, because a cache may keep a part of its content during a write. An H100 has 50 MiB.
        size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        self.flush = torch.empty(size, dtype=torch.int8, device=self.device)
        self.pause_ms = _FIRST_PAUSE_MS  # 0 means that no pause is long enough

    @property
    def with_host(self) -> bool:
        return self.pause_ms == 0.0

    def time(
        self, call: Callable[[], Any], repeats: int, before: Callable[[], None] = _nothing,
        after: Callable[[Any], None] = _nothing,
    ) -> list[float]:  # fmt: skip
        taken: list[float] = []
        with torch.cuda.device(self.device):
            while len(taken) < repeats:
                taken += self._queued(call, repeats - len(taken), before, after)
        return taken

    def _queued(
        self, call: Callable[[], Any], repeats: int, before: Callable[[], None], after: Callable[[Any], None]
    ) -> list[float]:
        """Time `repeats` calls, and return the milliseconds of those that were enqueued before the GPU started them.

        If the GPU started others too early, make the pause longer; if it is at its maximum, return their times too.
        """
        event: Callable[..., Any] = torch.cuda.Event
        sleep: Callable[[int], None] = torch.cuda._sleep
        timed: list[tuple[Any, Any]] = []
        late: list[tuple[Any, Any]] = []
        host_ms = 0.0
        for _ in range(repeats):
            start, end = event(enable_timing=True), event(enable_timing=True)
            before()
            self.flush.zero_()
            sleep(round(self.pause_ms * _CYCLES_PER_MS))
            start.record()
            since = perf_counter()
            answer = call()
            end.record()
            began = start.query()
            after(answer)
            del answer
            (late if began else timed).append((start, end))
            if began:
                host_ms = max(host_ms, (perf_counter() - since) * 1e3)
        torch.cuda.synchronize()
        if self.pause_ms in (0.0, _LONGEST_PAUSE_MS) and late:
            self.pause_ms = 0.0
            timed += late
        elif late:
            self.pause_ms = min(2 * max(self.pause_ms, host_ms), _LONGEST_PAUSE_MS)
        return [start.elapsed_time(end) for start, end in timed]


def clock_of(device: str) -> Clock:
    return CudaClock(device) if torch.device(device).type == "cuda" else CpuClock()


_TASKS = Path("/proc/self/task")  # one folder per thread; its schedstat has the time that the thread waited


def waited_ms() -> float | None:
    """Return for how many milliseconds, summed over this process's threads, a thread was ready but had no core.

    None if the system does not count it.
    """
    total, counted = 0, False
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with suppress(OSError):  # the thread has ended
            total += int((task / "schedstat").read_text().split()[1])
            counted = True
    return total / 1e6 if counted else None


class Waits:
    """Measure for which share of the time `threads` threads wait for a core that other programs use."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._spent_ms = self._waited_ms = 0.0
        self._at: float | None = None

    @property
    def share(self) -> float | None:
        """The share of the time, 0 to 1, for which a thread waited on average; None if the system does not count it."""
        if self._at is None or not self._spent_ms:
            return None
        return min(1.0, self._waited_ms / self._spent_ms / self._threads)

    def begin(self) -> None:
        self._at = waited_ms()

    def end(self, spent_ms: float) -> None:
        now = waited_ms()
        if now is not None and self._at is not None:
            self._spent_ms += spent_ms
            self._waited_ms += max(0.0, now - self._at)  # below 0 if a thread, and with it its count, has ended


class Slices:
    """Measure slices: the wall time between two yields of a generator, during which other users wait for the device.

    Inside `with_threads(count)`, torch has `count` threads in each slice, and the returned `Waits` measures how long
    they wait for a core.
    """

    def __init__(self, slice_ms: float) -> None:
        self.slice_ms = slice_ms
        self.longest_ms = 0.0
        self._before = 0.0
        self._threads = self._outside = 0
        self._waits: Waits | None = None
        self._since = perf_counter()

    @property
    def spent_ms(self) -> float:
        """The milliseconds since the current slice began."""
        return (perf_counter() - self._since) * 1e3

    @property
    def total_ms(self) -> float:
        """The milliseconds of all slices, without the pauses between them."""
        return self._before + self.spent_ms

    def end(self) -> float:
        """Close the slice just before a yield, and return its milliseconds."""
        spent = self.spent_ms
        self.longest_ms = max(self.longest_ms, spent)
        self._before += spent
        self._leave(spent)
        return spent

    def begin(self) -> None:
        """Open the next slice just after the yield."""
        self._enter()
        self._since = perf_counter()

    def pause(self) -> Iterator[float]:
        """Close the slice, yield its milliseconds, and open the next slice."""
        yield self.end()
        self.begin()

    @contextmanager
    def with_threads(self, count: int) -> Iterator[Waits]:
        """Run the block with `count` threads of torch.

        Set this number again after each pause, because other code may change it meanwhile.
        """
        self._threads, self._waits = count, (waits := Waits(count))
        since = self.spent_ms
        self._enter()
        try:
            yield waits
        finally:
            self._leave(max(0.0, self.spent_ms - since))
            self._threads, self._waits = 0, None

    def _enter(self) -> None:
        if self._waits is not None:
            self._outside = torch.get_num_threads()
            if self._outside != self._threads:
                torch.set_num_threads(self._threads)
            self._waits.begin()

    def _leave(self, spent_ms: float) -> None:
        if self._waits is not None and self._outside:
            self._waits.end(spent_ms)
            if self._outside != self._threads:
                torch.set_num_threads(self._outside)
            self._outside = 0


def uncertainty(samples: Sequence[float]) -> float:
    """Return half the width of the median's 95% confidence interval, divided by the median.

    It uses order statistics, which do not depend on the distribution of times: the interval extends 0.98·sqrt(n) ranks
    to both sides of the middle (Conover, Practical Nonparametric Statistics, §3.2). Up to n = 10 it is the whole range.
    """
    ordered, n = sorted(samples), len(samples)
    reach = 0.98 * math.sqrt(n)
    low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
    return (ordered[min(high, n - 1)] - ordered[max(low - 1, 0)]) / 2 / median(ordered)


_RESIDENT = Path("/proc/self/clear_refs")  # writing 5 resets the peak of resident memory (man 5 proc)


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Run `call` again, and return how many bytes it needs at most, with its results but without its inputs.

    On CUDA the value comes from the allocator's statistics and is exact. On the CPU it is the growth of the process's
    peak resident memory, as Linux reports it, with an error of some hundred KiB; it includes all threads and libraries.
    None if the system does not report it (all except Linux).
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _RESIDENT.exists():
        return None
    trim()  # otherwise the call could use memory that is free but still resident
    _RESIDENT.write_text("5")
    before = _kib("/proc/self/status", "VmHWM")
    call()
    return (_kib("/proc/self/status", "VmHWM") - before) * 1024


def available_bytes() -> int:
    """Return the bytes that this process can still allocate on the CPU, in the machine or in its container."""
    available = _kib("/proc/meminfo", "MemAvailable") * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        available = min(available, int(text) - int(used.read_text()))
    return available


def _kib(table: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(table).read_text().splitlines() if line.startswith(name))
