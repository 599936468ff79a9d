"""A clock times each call without pauses, and without the time in which Python enqueues the call."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpoint_kernels.timing import (
    clock,
)
from flashpoint_kernels.timing.clock import CpuClock, CudaClock, Slices, uncertainty
from tests.support.kernels.simulated_time import Time

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the CPU's measurements")


def test_a_clock_measures_each_call(time: Time) -> None:
    takes_ms = [2.0, 3.0, 5.0, 7.0, 11.0]
    calls = iter(takes_ms)

    def call() -> None:
        time.now_ms += next(calls)

    assert CpuClock().time(call, 5) == pytest.approx(takes_ms)


class Gpu:
    """A stand-in for the parts of torch.cuda that a clock uses: a queue and the host's time, in simulated ms."""

    def __init__(self) -> None:
        self.now = self.free = 0.0  # the host's time, and the time at which the GPU's queue will be empty
        self.calls = 0

    def enqueue(self, host_ms: float, gpu_ms: float) -> None:
        self.now += host_ms
        self.free = max(self.free, self.now) + gpu_ms

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def call(self, host_ms: float, gpu_ms: float, waits: bool = False) -> None:
        self.calls += 1
        self.enqueue(host_ms, gpu_ms)
        if waits:
            self.synchronize()

    def event(self, **_: object) -> Any:
        made = SimpleNamespace()

        def record() -> None:
            made.at = max(self.free, self.now)

        made.record, made.query = record, lambda: made.at <= self.now
        made.elapsed_time = lambda end: end.at - made.at
        return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, CudaClock]:
    made, cuda_clock = Gpu(), object.__new__(CudaClock)
    cuda_clock.device, cuda_clock.pause_ms = torch.device("cuda"), clock._FIRST_PAUSE_MS
    cuda_clock.flush = SimpleNamespace(zero_=lambda: made.enqueue(0.01, 0.035))  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.enqueue(0.01, cycles / clock._CYCLES_PER_MS))
    monkeypatch.setattr(clock, "perf_counter", lambda: made.now / 1e3)
    return made, cuda_clock


@pytest.mark.parametrize("host_ms", [0.1, 1.1, 5.0])
@pytest.mark.parametrize("gpu_ms", [0.02, 3.0])
def test_a_gpus_time_is_without_what_python_takes_to_enqueue(
    gpu: tuple[Gpu, CudaClock], host_ms: float, gpu_ms: float
) -> None:
    device, clock = gpu
    for repeats in (1, 20):
        assert clock.time(lambda: device.call(host_ms, gpu_ms), repeats) == pytest.approx([gpu_ms] * repeats)
    assert device.calls <= 21 + 2, "few are repeated"
    assert not clock.with_host


@pytest.mark.parametrize(
    "call",
    [
        lambda device: device.call(0.1, 0.5, waits=True),  # the call waits for its result
        lambda device: device.call(100.0, 0.5),  # mostly Python, little GPU work
    ],
)
def test_a_call_that_no_pause_covers_is_timed_with_its_host(
    gpu: tuple[Gpu, CudaClock], call: Callable[[Gpu], None]
) -> None:
    device, clock = gpu
    clock.time(lambda: call(device), 1)
    began = device.now
    taken = clock.time(lambda: call(device), 10)
    assert sum(taken) == pytest.approx(device.now - began, rel=0.2)
    assert device.calls <= 11 + 8
    assert clock.with_host


def test_the_median_is_known_by_order_statistics() -> None:
    assert uncertainty([1.0, 2.0, 4.0]) == (4 - 1) / 2 / 2  # few times: their whole range
    many = [100 + (n % 10) for n in range(1000)]
    assert 0 < uncertainty(many) < 0.01  # values 31 ranks below and above the median differ by about 1 %
    assert uncertainty([5.0] * 10) == 0
    assert uncertainty([1.0] * 50 + [1000.0] * 3) == 0  # a few delayed calls do not matter


def test_slices_leave_out_the_pauses(time: Time) -> None:
    slices = Slices(10)
    time.now_ms += 4
    assert slices.end() == pytest.approx(4)
    time.now_ms += 100  # a pause
    slices.begin()
    time.now_ms += 3
    assert slices.total_ms == pytest.approx(7)
    assert slices.end() == pytest.approx(3)
    assert slices.longest_ms == pytest.approx(4)


def test_waiting_for_a_core_is_counted() -> None:
    if (before := clock.waited_ms()) is None:
        pytest.skip("this system does not count waiting")
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        while (clock.waited_ms() or 0.0) <= before:
            sum(range(10_000))  # sometimes waits for a core, because other processes use all cores
    finally:
        for each in load:
            each.kill()
            each.wait()
