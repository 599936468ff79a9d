"""Measurements fill each field of their rows, run grids of cases, and let other work use the device between slices."""

import math
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from flashpoint_kernels import native
from flashpoint_kernels.problems import reproducible
from flashpoint_kernels.tiled_backend import tiles as tile_loop
from flashpoint_kernels.timing import (
    ROW_FIELDS,
    Case,
    Timing,
    clock,
    grid,
    implementations,
    measure,
    measurement,
    run_grid,
)
from flashpoint_kernels.timing.case import flops, held_bytes, moved_bytes, standard_flops
from flashpoint_kernels.timing.clock import Slices
from flashpoint_kernels.timing.device import is_lost, peak_of
from flashpoint_kernels.timing.implementations import CannotRunError
from tests.support.kernels.simulated_time import Time

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the CPU's measurements")
QUICK = Timing(precision=0.5, max_seconds=0.05, warmup_ms=0, slice_ms=5)
FIGURES = ("ms", "ms_p20", "ms_p80", "repeats", "flops", "tflops", "bytes", "roofline_percent", "peak_bytes")


def small(backend: str, **fields: Any) -> Case:
    return Case(
        **{"backend": backend, "batch": 1, "q_heads": 2, "q_len": 64, "head_dim": 16, "dtype": "float32"} | fields
    )


def finish(running: Generator[float, None, dict[str, Any]]) -> tuple[dict[str, Any], list[float]]:
    slices = []
    while True:
        try:
            slices.append(next(running))
        except StopIteration as end:
            return end.value, slices


def test_a_row_has_every_field_and_they_agree() -> None:
    case = small("tiled", direction="backward", causal=True)
    row, slices = finish(measure(case, timing=QUICK, naive_ms=3.0))
    assert tuple(row) == ROW_FIELDS
    assert [name for name in ROW_FIELDS if row[name] is None] == ["skipped"]
    assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    assert row["repeats"] >= QUICK.min_repeats
    assert row["flops"] == flops("fused_backward", case)
    assert row["bytes"] == moved_bytes("fused_backward", case)
    assert row["flops_standard"] == standard_flops(case)
    assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9)
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6)
    assert row["arithmetic_intensity"] == row["flops"] / row["bytes"]
    assert row["speedup_over_naive"] == 3.0 / row["ms"]
    assert row["longest_slice_ms"] >= max(slices)
    peak = peak_of("cpu", "float32")
    reachable = min(peak.tflops, row["arithmetic_intensity"] * peak.gb_per_s / 1e3)
    assert row["roofline_percent"] == pytest.approx(100 * row["tflops"] / reachable)
    assert (row["value_dim"], row["head_dim"], bool(row["device"])) == (16, 16, True)


@pytest.mark.parametrize(
    ("ticks_ms", "ms", "above"),
    [
        pytest.param([1.0], 1.0, False, id="below"),
        pytest.param([0.001, 1.0], 1.0, False, id="below the second time"),
        pytest.param([0.002, 0.001], 0.002, True, id="above both times", marks=pytest.mark.slow),
    ],
)
def test_a_time_above_the_roof_is_measured_again(
    time: Time, monkeypatch: pytest.MonkeyPatch, ticks_ms: list[float], ms: float, above: bool
) -> None:
    """A time shorter than the roofline allows, 0.03 ms with these peaks, is measured again; the longer time counts."""
    tiled, ticks = implementations.IMPLEMENTATIONS["tiled"], iter(ticks_ms)

    def make(*about: Any) -> Any:
        time.tick_ms = next(ticks)
        return tiled.make(*about)

    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "tiled", replace(tiled, make=make))
    row, _ = finish(measure(small("tiled"), timing=QUICK))
    assert (row["skipped"], row["ms"], row["roofline_percent"] > 100) == (None, pytest.approx(ms), above)
    assert next(ticks, None) is None  # all times were used


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_every_direction_is_timed(direction: Any) -> None:
    row, _ = finish(measure(small("naive", direction=direction), timing=QUICK))
    assert row["skipped"] is None
    assert row["ms"] > 0


def test_what_cannot_run_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    for case, reason in [
        (small("triton"), "CUDA"),
        (small("sdpa_cudnn"), "No viable backend"),
        (small("xformers"), "not installed"),
        (small("cpu", value_dim=8), "install a C compiler"),
        (small("naive", q_len=1 << 24), "GiB"),  # refused before anything is allocated
    ]:
        row, _ = finish(measure(case, timing=QUICK))
        assert reason in row["skipped"]
        assert [row[name] for name in FIGURES] == [None] * len(FIGURES)
        assert row["q_len"] == case.q_len


def test_a_lost_device_ends_all_with_the_row_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access every call on a GPU fails: `measure` raises DeviceLostError with the row of the case."""

    def gone(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    assert is_lost("cuda:0")
    assert not is_lost("cpu")
    monkeypatch.setattr(measurement, "is_lost", lambda device: True)
    with pytest.raises(measurement.DeviceLostError, match="No viable backend") as lost:
        finish(measure(small("sdpa_cudnn"), timing=QUICK))
    assert tuple(lost.value.row) == ROW_FIELDS
    assert lost.value.row["skipped"] in str(lost.value)
    assert "CUDA" in str(lost.value)  # the server checks its device after an error with this word
    assert finish(measure(small("naive"), timing=QUICK))[0]["ms"] > 0, "only a failure checks the device"


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Set two threads, because memory is bounded for each thread and machines have different numbers of threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(reproducible, "CORES", 2)
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.slow
def test_naive_memory_grows_with_the_square_and_ours_with_the_length(two_threads: int) -> None:
    """Memory of `naive` grows with the squared length, that of `tiled` and `cpu` with the length.

    It is measured in a new process, which has no other threads.
    """
    code = f"import torch; torch.set_num_threads({two_threads}); from {__name__} import check_memory; check_memory()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def check_memory() -> None:
    def peak(backend: str, length: int, direction: Any = "forward") -> int:
        row, _ = finish(measure(small(backend, q_len=length, direction=direction), timing=QUICK))
        return int(row["peak_bytes"])

    noise = 1 << 20  # pages of threads and of Python
    # Per thread: one tile of scores of `tiled` (those of `cpu` are smaller), and as much again for BLAS and rows.
    tiles = torch.get_num_threads() * 2 * math.prod(tile_loop.FORWARD_TILE) * 4
    for length in (1024, 2048):
        matrix = 2 * length * length * 4
        assert abs(peak("naive", length) - 2 * matrix) < noise  # S and P
        assert peak("naive", length, "backward") > 3 * matrix - noise  # and dP, besides the matrices of the forward
        for backend in ("tiled", "cpu"):
            linear = 2 * length * 16 * 4  # bytes of a tensor of q's size; five may exist twice: as given, and converted
            assert peak(backend, length) < 10 * linear + tiles + noise
    assert 10 * linear + tiles + noise < matrix / 4  # the bound of `tiled` and `cpu` at the last length


def test_a_slice_ends_at_its_bound_and_a_pause_is_not_counted(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each repeat takes longer than `slice_ms`, each has its own slice; if all fit in `slice_ms`, they share one."""
    monkeypatch.setattr(measurement, "_fewer", lambda ms, timing: None)
    monkeypatch.setattr(measurement, "held_bytes", lambda algorithms, case: 0)
    time.tick_ms = 2.0  # slower than the roofline, so that no time is measured again
    stages = 4 + 2  # four inputs, a first call, and the call that measures memory
    for slice_ms, slices_of_repeats in ((1e-6, 30), (1e6, 1)):
        timing = Timing(precision=1e-9, max_seconds=60, warmup_ms=0, slice_ms=slice_ms, min_repeats=30, max_repeats=30)
        running = measure(small("naive"), timing=timing)
        slices, paused, began = [], 0.0, time.now_ms
        while True:
            try:
                slices.append(next(running))
            except StopIteration as end:
                row = end.value
                break
            time.now_ms += 4096  # other programs use the device
            paused += 4096
        assert row["repeats"] == 30
        assert len(slices) == stages + slices_of_repeats
        assert 0 < sum(slices) <= time.now_ms - began - paused < 4096
        assert max(slices) <= row["longest_slice_ms"] < 4096


def test_a_closed_measurement_stops_at_the_slice(time: Time) -> None:
    time.tick_ms = 0.125
    timing = Timing(precision=1e-9, max_seconds=3600, slice_ms=1e-6, min_repeats=1000)
    running = measure(small("naive"), timing=timing)
    for _ in range(12):  # until the repeats have begun
        next(running)
    running.close()
    with pytest.raises(StopIteration):
        next(running)


@pytest.mark.slow
def test_a_grid_yields_the_device_then_rows_with_naive_first() -> None:
    shapes = [{"batch": 1, "q_heads": 1, "q_len": n, "head_dim": 16} for n in (16, 32)]
    cases = grid(shapes, backends=["tiled", "triton", "naive"], dtypes=["float32", "bfloat16"])
    events = list(run_grid(cases, "cpu", QUICK))
    rest = [event for event in events if event["type"] != "progress"]
    assert rest[0]["type"] == "device"
    assert rest[0]["environment"]["torch"] == torch.__version__
    assert set(rest[0]["environment"]["peaks"]) == {"float32", "bfloat16"}
    rows = [event["row"] for event in rest[1:]]
    assert [event["done"] for event in rest[1:]] == list(range(1, 13))
    assert [row["backend"] for row in rows] == ["naive", "tiled", "triton"] * 4
    assert [(row["q_len"], row["dtype"]) for row in rows[::3]] == [
        (16, "float32"), (16, "bfloat16"), (32, "float32"), (32, "bfloat16"),
    ]  # fmt: skip
    for naive, ours in zip(rows[::3], rows[1::3], strict=True):
        assert naive["speedup_over_naive"] is None
        assert ours["speedup_over_naive"] == naive["ms"] / ours["ms"]
    progress = [event for event in events if event["type"] == "progress"]
    assert all(event["total"] == 12 and 0 <= event["done"] < 12 for event in progress)
    assert [event["done"] for event in progress] == sorted(event["done"] for event in progress)


def test_a_speedup_is_over_the_naive_time_of_its_own_problem(time: Time) -> None:
    """Each row takes twice the time of the row before, so no two have the same."""
    shapes = [{"batch": 1, "q_heads": 1, "q_len": n, "head_dim": 16} for n in (16, 32)]
    rows, time.tick_ms = [], 1.0
    for event in run_grid(grid(shapes, backends=["tiled", "naive"], dtypes=["float32"]), "cpu", QUICK):
        if event["type"] == "row":
            rows.append(event["row"])
            time.tick_ms *= 2
    assert len({row["ms"] for row in rows}) == 4
    for naive, ours in zip(rows[::2], rows[1::2], strict=True):
        assert naive["speedup_over_naive"] is None
        assert ours["speedup_over_naive"] == naive["ms"] / ours["ms"]


def test_the_device_is_given_back_while_a_call_compiles() -> None:
    compiled, seen = Event(), []
    running = measurement.aside(lambda: seen.append(compiled.wait(600)), Slices(10))
    for _ in range(3):
        next(running)
    assert not seen
    compiled.set()
    list(running)
    assert seen == [True]


def test_what_fails_while_it_compiles_says_so() -> None:
    def fail() -> None:
        raise CannotRunError("no kernel for this")

    with pytest.raises(CannotRunError, match="no kernel for this"):
        list(measurement.aside(fail, Slices(10)))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that starts with 4 and gets each count passed to `torch.set_num_threads`; measure no memory."""
    seen: list[int] = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen[-1])
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(measurement, "peak_bytes", lambda call, device: None)
    return seen


@pytest.mark.parametrize(
    ("ms_of", "best", "tried", "busy"),
    [
        ({4: 1.0, 2: 1.5, 1: 3.0}, 4, {4, 2, 1}, False),  # a quiet machine
        ({4: 1.0, 2: 0.98, 1: 1.02}, 4, {4, 2, 1}, False),  # within the noise
        ({4: 0.5, 2: 0.4, 1: 0.3}, 1, {4, 2, 1}, False),  # small problem: threads cost more than they save
        ({4: 24.0, 2: 20.0, 1: 0.3}, 1, {4, 2, 1}, True),  # threads wait for a busy core
        ({4: 200.0, 2: 50.0, 1: 90.0}, 2, {4, 2, 1}, True),  # a long call: halve the threads while it gets faster
        ({4: 200.0, 2: 300.0, 1: 90.0}, 4, {4, 2}, False),
        ({4: 70_000.0, 2: 1.0, 1: 1.0}, 4, {4}, False),  # too long to try
    ],
)
def test_fewer_threads_count_where_they_are_faster(
    time: Time, threads: list[int], monkeypatch: pytest.MonkeyPatch, ms_of: dict[int, float], best: int,
    tried: set[int], busy: bool,
) -> None:  # fmt: skip
    def make(case: Case, device: str) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            time.now_ms += ms_of[threads[-1]]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return attend

    monkeypatch.setattr(clock, "waited_ms", lambda: 0.0)
    tiled = implementations.IMPLEMENTATIONS["tiled"]
    for name in ("tiled", "naive"):  # one of our backends and the baseline
        monkeypatch.setitem(implementations.IMPLEMENTATIONS, name, replace(tiled, make=make))
        row, _ = finish(measure(small(name), timing=Timing(warmup_ms=0)))
        assert (row["threads"], row["ms"], row["busy"]) == (best, pytest.approx(ms_of[best]), busy)
        assert row["ms_by_threads"] == {str(n): pytest.approx(ms_of[n]) for n in sorted(tried)}
        assert threads[-1] == 4, "the count is restored"


@pytest.mark.parametrize(("waits", "busy"), [(0.0, False), (0.01, False), (0.3, True), (None, False)])
def test_a_row_is_marked_where_threads_waited_for_a_core(
    time: Time, threads: list[int], monkeypatch: pytest.MonkeyPatch, waits: float | None, busy: bool
) -> None:
    def waited() -> float | None:
        return None if waits is None else waits * threads[-1] * time.now_ms

    time.tick_ms = 1.0
    monkeypatch.setattr(clock, "waited_ms", waited)
    row, _ = finish(measure(small("naive"), timing=QUICK))
    assert row["busy"] == busy
    assert row["waited"] == (None if waits is None else pytest.approx(waits, abs=0.05))


def test_memory_below_what_the_algorithm_holds_is_measured_again_or_marked(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    time.tick_ms = 1.0  # slower than the roofline, so that no time is measured again
    case = small("naive", q_len=128)
    min_bytes = held_bytes(("naive_forward",), case)
    assert min_bytes == 2 * 128 * 16 * 4 + 2 * 128 * 128 * 4  # o, and the matrix of scores
    for readings, expected in (
        ([0, min_bytes - 1, min_bytes + 5], (min_bytes + 5, False)),
        ([0, 7, 3, 1], (7, True)),
        ([min_bytes], (min_bytes, False)),
        ([None], (None, False)),
    ):
        answers = iter(readings)
        monkeypatch.setattr(measurement, "peak_bytes", lambda call, device, answers=answers: next(answers))
        row, _ = finish(measure(case, timing=QUICK))
        assert (row["peak_bytes"], row["peak_bytes_low"]) == expected
        assert next(answers, "none left") == "none left"


@pytest.mark.parametrize("backend", ["naive", "cpu", "tiled", "sdpa_flash"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_least_memory_is_below_what_a_call_holds(backend: str, direction: Any) -> None:
    row, _ = finish(measure(small(backend, q_len=1024, q_heads=4, direction=direction), timing=QUICK))
    assert row["peak_bytes_low"] is False
