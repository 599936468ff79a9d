"""The tasks of `make gpu` (checks, trials and timings) are right, with real kernels under Triton's interpreter."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_day import decode, smoke, work
from benchmarks.gpu_day.device import Cuda
from benchmarks.gpu_day.plan import SWEEP, Decode, Smoke, Timed, Trial
from flashpoint_kernels.timing.case import Case
from flashpoint_kernels.timing.implementations import CannotRunError
from flashpoint_kernels.triton_backend.tools.aot import KERNELS
from tests.support.gpu_stand_in import StandIn

SHAPE = (1, 1, 20, 16)  # 20 queries: with fewer, the kernels would pack heads into one block and use other tiles
SLOW_CHECKS = {
    "merge", "packed_backward_q", "int8", "pages", "pages_many", "options", "mask", "backward_mask", "backward_sinks",
    "float32", "forward_hopper", "wide", "widest", "widest_split", "repeats_backward", "repeats_forward_hopper",
    "repeats_backward_hopper", "backward_stored", "repeats_backward_stored",
    "backward_stored_hopper", "backward_wide_hopper", "repeats_backward_stored_hopper",
    "forward_two_sets_hopper", "repeats_forward_two_sets_hopper",
}  # fmt: skip


@pytest.fixture
def device(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "notes")


def test_every_kernel_has_a_smoke_test() -> None:
    """A developer who adds a kernel must add a check to benchmarks/gpu_day/smoke.py."""
    covered = {name for check in smoke.CHECKS.values() for name in check.kernels}
    assert covered == {kernel.__name__ for kernel in KERNELS.values()} | {"nano_forward"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW_CHECKS else []) for name in smoke.CHECKS],
)
def test_a_smoke_test_runs_its_kernels_and_agrees_with_float64(name: str, device: StandIn) -> None:
    result = work.perform(device, Smoke(name))
    assert result["ok"], result
    assert set(smoke.CHECKS[name].kernels) <= set(result["kernels"])


def test_a_smoke_test_fails_where_another_kernel_ran_or_an_answer_is_wrong(
    device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        smoke.CHECKS, "forward", replace(smoke.CHECKS["forward"], kernels=("attention_forward_hopper",))
    )
    result = work.perform(device, Smoke("forward"))
    assert (result["ok"], result["missing"]) == (False, ["attention_forward_hopper"])
    monkeypatch.setattr(smoke, "nano_attention", lambda q, k, v, causal: (torch.zeros_like(q), q[..., 0].float()))
    assert not work.perform(device, Smoke("nano"))["ok"]


@pytest.mark.parametrize(
    "kernel", [kernel if kernel == "forward" else pytest.param(kernel, marks=pytest.mark.slow) for kernel in SWEEP]
)
def test_a_trial_runs_its_kernel_with_its_tile_and_a_wrong_answer_is_no_time(
    kernel: str, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Trial(kernel, SHAPE, (16, 32, 4, 2))
    if tried.stored and tried.hopper:  # tiles of stored dS have a size of their own, and 256 columns need two kernels
        wide = kernel.startswith(("backward_v", "backward_k_"))
        tried = Trial(kernel, (1, 1, 20, 136 if wide else 16), (128 if "_q_" in kernel else 64, 128, 4, 2))
    ran = [call for call in work._calls_of(device, tried)[0] if call.programs]
    assert [(call.tile.block_m, call.tile.block_n) for call in ran] == [tried.tile[:2]]
    assert [call.kernel.__name__ for call in ran] == [f"attention_{kernel.replace('_storing', '')}"]
    assert {bool(call.constants.STORE_DS) for call in ran} == {kernel.partition("_hopper")[0].endswith("_storing")}
    result = work.perform(device, tried)
    assert (result["ms"], result["shipped"], result["block_m"], result["spills"]) == (1.0, False, tried.tile[0], 0)
    truth = work._truth(device, replace(tried, tile=None))
    monkeypatch.setattr(work, "_truth", lambda *_: [t + 1 for t in truth])
    wrong = work.perform(device, tried)
    assert (wrong["ms"], wrong["wrong_by"] > 0.02) == (None, True)


def test_a_tile_that_does_not_fit_is_refused_and_the_shipped_one_fails(
    device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = Trial("forward", SHAPE)
    assert work.perform(device, shipped)["shipped"]

    def refuse(*_: Any) -> Any:
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(work, "_time", refuse)
    result = work.perform(device, replace(shipped, tile=(16, 32, 4, 2)))
    assert (result["ms"], result["refused"]) == (None, "RuntimeError: out of resource: shared memory")
    with pytest.raises(RuntimeError, match="out of resource"):
        work.perform(device, shipped)
    monkeypatch.setattr(StandIn, "is_lost", lambda self: True)
    with pytest.raises(RuntimeError, match="out of resource"):
        work.perform(device, replace(shipped, tile=(16, 32, 4, 2)))


@pytest.mark.parametrize("unwritten", [0, 1])
def test_what_a_trial_leaves_unwritten_is_no_answer(
    unwritten: int, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that a trial does not write is wrong, even if its memory has the right answer of an earlier trial."""
    right = [torch.ones(4), torch.ones(4)]
    left = [t.clone() for t in right]
    call = SimpleNamespace(args=tuple, run=lambda: left[1 - unwritten].copy_(right[0]))
    monkeypatch.setattr(work, "_calls_of", lambda *_: ([call], left))
    monkeypatch.setattr(work, "_truth", lambda *_: right)
    row = work.trial(device, Trial("backward_kv", SHAPE, (16, 32, 4, 2)))
    assert row["ms"] is None
    assert math.isnan(row["wrong_by"])


OCCUPANCY = """
import json
import types

import torch
from flashpoint_kernels import Options, Problem
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.tools import ahead

from benchmarks.gpu_day.device import Cuda

ahead.pretend(90)
q = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
(call,) = launch.forward_calls([Problem.create({"q": q, "k": q, "v": q}, Options())])
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(
    shared_memory_per_multiprocessor=228 << 10, max_threads_per_multi_processor=2048
)
print(json.dumps(Cuda().occupancy(call)))
"""


@pytest.mark.slow
def test_what_the_compiler_made_of_a_call_is_read_from_its_code(tmp_path: Path) -> None:
    """Registers and spills come from a kernel compiled for an absent sm_90; the device properties are made up."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", OCCUPANCY], env=env | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert 16 <= document["registers"] <= 255
    assert document["spills"] == 0
    assert document["shared_bytes"] > 0
    assert 1 <= document["programs_per_multiprocessor"] <= 2048 // 128


def test_what_the_compiler_made_cannot_be_read_and_the_time_stays(
    device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: StandIn, call: Any) -> dict[str, Any]:
        raise AttributeError("n_regs")

    monkeypatch.setattr(StandIn, "occupancy", gone)
    result = work.perform(device, Trial("forward", SHAPE, (16, 32, 4, 2)))
    assert (result["ms"], result["occupancy"]) == (1.0, "AttributeError: n_regs")


@pytest.mark.parametrize("before", [None, "1"])
def test_torch_and_our_path_are_asked_for_one_task_alone(
    before: str | None, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure(self: StandIn, case: Case) -> dict[str, Any]:
        filled: Any = torch.utils.deterministic
        assert not filled.fill_uninitialized_memory
        paths = (os.environ[f"FLASHPOINT_{name}"] for name in ("HOPPER", "STORE_DS", "TWO_SETS"))
        seen.append((torch.are_deterministic_algorithms_enabled(), *paths))
        return {}

    monkeypatch.setattr(StandIn, "measure", measure)
    if before is None:
        monkeypatch.delenv("FLASHPOINT_HOPPER", raising=False)
    else:
        monkeypatch.setenv("FLASHPOINT_HOPPER", before)
    case = Case(backend="triton", batch=1, q_heads=1, q_len=16, head_dim=16)
    for modes in ("", "hopper", "deterministic", "stored", "hopper two_sets"):
        work.perform(device, Timed(case, **dict.fromkeys(modes.split(), True)))
    assert seen == [
        (False, "0", "0", "0"), (False, "1", "0", "0"), (True, "0", "0", "0"), (False, "0", "1", "0"),
        (False, "1", "0", "1"),
    ]  # fmt: skip
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("FLASHPOINT_HOPPER") == before


def test_decoding_is_timed_where_it_is_right_and_says_what_is_not_there(
    device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Decode("triton", 2, 4, 2, 40, 16)
    result = work.perform(device, whole)
    assert (result["ms"], result["bytes"]) == (1.0, 2 * 2 * 2 * 40 * 2 * 16)
    assert work.perform(device, replace(whole, backend="flashinfer", page=16))["skipped"].startswith("flashinfer")
    monkeypatch.setattr(decode, "attention", lambda q, *_, **__: torch.zeros_like(q))
    wrong = work.perform(device, whole)
    assert (wrong["ms"], wrong["wrong_by"]) == (None, pytest.approx(1, abs=0.01))


class Counted(torch.Tensor):
    """A tensor that counts the calls of `tolist`, which copies its elements from the device."""

    reads = 0

    def tolist(self) -> Any:
        Counted.reads += 1
        return super().tolist()


def test_a_timed_call_over_pages_reads_no_lengths_from_the_device(
    device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a call read the lengths, it would wait for the device, and its time would include work of the host."""
    task = Decode("triton", 2, 4, 2, 40, 16, page=16)
    cache = decode.make_cache(device, task)
    counted, reads = replace(cache, lengths=cache.lengths.as_subclass(Counted)), []

    def milliseconds(_: StandIn, call: Any) -> list[float]:
        before = Counted.reads
        call()
        reads.append(Counted.reads - before)
        return [1.0]

    monkeypatch.setattr(decode, "make_cache", lambda *_: counted)
    monkeypatch.setattr(StandIn, "milliseconds", milliseconds)
    assert work.perform(device, task)["ms"] == 1.0
    assert (reads, Counted.reads > 0) == ([0], True)


def test_a_time_with_the_hosts_in_it_is_no_row(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(time=lambda call, repeats: [1.0] * repeats, with_host=True)
    monkeypatch.setattr("flashpoint_kernels.timing.clock.clock_of", lambda name: made)
    with pytest.raises(CannotRunError, match="the call waits for the device"):
        Cuda().milliseconds(lambda: None)
    monkeypatch.setattr(StandIn, "milliseconds", Cuda.milliseconds)
    row = work.perform(device, Decode("triton", 2, 4, 2, 40, 16))
    assert row["ms"] is None
    assert row["skipped"].startswith("the call waits for the device")


def test_decoding_from_pages_is_timed_where_it_is_right(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Decode("triton", 2, 4, 2, 40, 16, page=16)
    assert work.perform(device, task)["ms"] == 1.0
    right = decode.attention
    monkeypatch.setattr(
        decode,
        "attention",
        lambda *tensors, block_table, **more: right(*tensors, block_table=block_table.flip(1), **more),
    )
    assert work.perform(device, task)["ms"] is None
