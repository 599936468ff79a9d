"""Measure the time and the memory of calls.

Time is monotonic time around each call on the CPU, and CUDA events around each on a GPU with its L2 flushed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def time(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """The milliseconds of each of `repeats` calls; none of them is still running when it returns."""


class CpuClock:
    def time(self, call: Callable[[], Any], repeats: int) -> list[float]:
        taken = []
        for _ in range(repeats):
            start = perf_counter_ns()
            answer = call()
            taken.append((perf_counter_ns() - start) / 1e6)
            del answer  # freed outside the time, as a caller would keep it
        return taken


_CYCLES_PER_MS = 2_000_000  # at 2 GHz, the most of an H100: a slower clock makes a pause longer
_FIRST_PAUSE_MS = 0.5  # an operator of torch is enqueued in a tenth of it
_LONGEST_PAUSE_MS = 32.0


class CudaClock:
    """The GPU's time of calls queued one behind the other, each after a write to all of L2 and a pause on the GPU.

    Events tell when the GPU reaches them. In the pause the host enqueues the whole call, so that the GPU never waits
    for Python within it. A call that the GPU began before the host was done is made again, after a pause twice as long
    as the host took. A call that no pause of `_LONGEST_PAUSE_MS` covers waits for the device itself, or makes more
    launches than the device queues: it is timed without one, and its host with it.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        # Twice the cache, as one that is written to may keep a part of what was there. 50 MiB on H100.
        size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        self.flush = torch.empty(size, dtype=torch.int8, device=self.device)
        self.pause_ms = _FIRST_PAUSE_MS  # 0: none would do

    def time(self, call: Callable[[], Any], repeats: int) -> list[float]:
        taken: list[float] = []
        with torch.cuda.device(self.device):
            while len(taken) < repeats:
                taken += self._queued(call, repeats - len(taken))
        return taken

    def _queued(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """The milliseconds of those of `repeats` calls that the GPU did not wait in; a longer pause for the others."""
        event: Callable[..., Any] = torch.cuda.Event
        sleep: Callable[[int], None] = torch.cuda._sleep
        timed: list[tuple[Any, Any]] = []
        late: list[tuple[Any, Any]] = []
        host_ms = 0.0
        for _ in range(repeats):
            start, end = event(enable_timing=True), event(enable_timing=True)
            self.flush.zero_()
            sleep(round(self.pause_ms * _CYCLES_PER_MS))
            start.record()
            since = perf_counter()
            call()
            end.record()
            began = start.query()
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


class Slices:
    """The wall time between one yield of a generator and the next, which is how long others wait for the device."""

    def __init__(self, slice_ms: float) -> None:
        self.slice_ms = slice_ms
        self.longest_ms = 0.0
        self._before = 0.0
        self._since = perf_counter()

    @property
    def spent_ms(self) -> float:
        """Return the time of the open slice."""
        return (perf_counter() - self._since) * 1e3

    @property
    def total_ms(self) -> float:
        """Return the time of all slices, without the pauses between them."""
        return self._before + self.spent_ms

    def end(self) -> float:
        """Close the slice, just before a yield; its milliseconds."""
        spent = self.spent_ms
        self.longest_ms = max(self.longest_ms, spent)
        self._before += spent
        return spent

    def begin(self) -> None:
        """Open the next one, just after the yield."""
        self._since = perf_counter()


def uncertainty(samples: Sequence[float]) -> float:
    """Half the width of the median's 95% confidence interval, over the median.

    By order statistics, which suppose nothing of how times are distributed: the interval reaches 0.98·sqrt(n) ranks
    to either side of the middle (Conover, Practical Nonparametric Statistics, §3.2), and is all there is up to n = 5.
    """
    ordered, n = sorted(samples), len(samples)
    reach = 0.98 * math.sqrt(n)
    low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
    return (ordered[min(high, n - 1)] - ordered[max(low - 1, 0)]) / 2 / median(ordered)


_RESIDENT = Path("/proc/self/clear_refs")  # writing 5 resets the peak of resident memory (man 5 proc)


def peak_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Run `call`, which has run before, and see what its peak adds; what it returns counts, its inputs do not.

    On CUDA the allocator's own statistics, exact. On the CPU what the kernel saw resident in this process at most, on
    all threads and of all libraries, to some hundred KiB; None where the system does not tell (all but Linux).
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
    ctypes.CDLL(None).malloc_trim(0)  # else the call would be served from memory that is free, yet resident
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
