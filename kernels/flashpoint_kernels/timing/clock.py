"""How long calls take: monotonic time around each on the CPU, CUDA events around each on a GPU with its L2 flushed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


class CudaClock:
    """Calls are queued one behind the other, each after a write to all of L2, which also hides its launch."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        # Twice the cache, as one that is written to may keep a part of what was there. 50 MiB on H100.
        size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        self.flush = torch.empty(size, dtype=torch.int8, device=self.device)

    def time(self, call: Callable[[], Any], repeats: int) -> list[float]:
        with torch.cuda.device(self.device):
            event: Callable[..., Any] = torch.cuda.Event
            events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
            for start, end in events:
                self.flush.zero_()
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


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
        """Of the slice that is open."""
        return (perf_counter() - self._since) * 1e3

    @property
    def total_ms(self) -> float:
        """Of all slices, the pauses between them left out."""
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
