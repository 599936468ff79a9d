"""At its start, an engine compares its kernels with exact answers, and switches off those that are wrong."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_kernels import available_backends, native
from flashpoint_kernels.cpu_backend import forward as forward_in_c
from flashpoint_kernels.cpu_backend import run as in_c
from flashpoint_kernels.native import build, switches
from flashpoint_kernels.native.forward import TASK, Forward
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.reference_backend import formula
from flashpoint_kernels.tiled_backend import tiles
from flashpoint_server.engine.execution.cpu import CpuDevice
from flashpoint_server.engine.self_test import check_backends, may_pass

BEST = native.names("backward").get("bfloat16", "c-none").removeprefix("c-")
LEVELS = native.LEVELS[: native.LEVELS.index(BEST) + 1] if BEST in native.LEVELS else (BEST,)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget at the end what a check has switched off in this process."""
    monkeypatch.setattr(switches, "_found", {})

    def forget() -> None:
        for cached in (native.library, available_backends):
            getattr(cached, "cache_clear", lambda: None)()

    forget()
    yield
    monkeypatch.undo()
    forget()


def checked() -> CpuDevice:
    device = CpuDevice.open()
    check_backends(device)
    return device


def test_right_kernels_stay() -> None:
    device = checked()
    assert device.info.backends[:3] == ("cpu", "tiled", "reference")
    assert device.info.kernels_off == {}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_backend_is_switched_off_and_named(
    direction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check finds one element of one output that is wrong by 0.5, as after a miscompilation."""
    compute = getattr(tiles, direction)

    def miscompiled(problems: list[Problem], tile: tuple[int, int] | None = None) -> None:
        compute(problems, tile)
        next(reversed(problems[0].outputs.values())).view(-1)[-1] += 0.5

    monkeypatch.setattr(tiles, direction, miscompiled)
    device = checked()
    assert "tiled" not in device.info.backends
    assert device.info.backends[0] == "cpu"
    assert device.info.kernels_off["tiled"].startswith("the check at the engine's start: ")
    assert "kernel switched off" in capsys.readouterr().out


def test_a_kernel_that_raises_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problems: list[Problem], tile: tuple[int, int] | None = None) -> None:
        raise KeyError("an unexpected error")

    monkeypatch.setattr(tiles, "backward", fails)
    assert "KeyError" in checked().info.kernels_off["tiled"]


def test_a_kernel_without_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(problems: list[Problem], tile: tuple[int, int] | None = None) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(tiles, "backward", short)
    with pytest.raises(MemoryError):
        checked()


def test_a_wrong_mask_of_float16_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in C that read a mask of float16 as bfloat16 are off, and so is the whole backend: all levels do."""
    read = forward_in_c.mask_of

    def as_another_type(problem: Problem) -> object:
        mask = read(problem)
        return mask.view(torch.bfloat16) if mask is not None and mask.dtype == torch.float16 else mask

    monkeypatch.setattr(forward_in_c, "mask_of", as_another_type)
    device = checked()
    assert device.info.backends[0] == "tiled"
    computing_float16 = {*LEVELS} - {*switches.BFLOAT16}
    assert {f"{level}.forward" for level in computing_float16} <= device.info.kernels_off.keys()
    assert "mask in float16" in device.info.kernels_off[f"{LEVELS[0]}.forward"]


def test_a_merge_that_loses_a_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Forward.shares

    def short(self: Forward, workers: int) -> object:
        tasks, merged = shares(self, workers)
        for task, _ in merged:
            task[TASK.index("stop")] -= 1024
        return tasks, merged

    monkeypatch.setattr(Forward, "shares", short)
    found = checked().info.kernels_off
    assert "merge" in found[f"{LEVELS[0]}.forward"]


def test_a_second_call_that_reads_old_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared call that computes from a copy of its tensors is right the first time only."""
    prepared = in_c.prepared

    def stale(problem: Problem, *arguments: object) -> Callable[[], object]:
        problem.tensors["k"] = problem.tensors["k"].clone()
        given = problem.tensors["k"]
        call = prepared(problem, *arguments)  # type: ignore[arg-type]
        problem.tensors["k"] = given.clone()
        return call

    monkeypatch.setattr(in_c, "prepared", stale)
    assert f"{BEST}.forward" in checked().info.kernels_off


def test_without_a_right_backend_the_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_c, "forward", lambda problems: None)
    monkeypatch.setattr(tiles, "forward", lambda problems, tile=None: None)
    monkeypatch.setattr(switches, "_found", {"triton": "the test does without it"})
    with pytest.raises(RuntimeError, match="no backend computes rightly on cpu"):
        checked()


def test_a_wrong_reference_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = formula.forward

    def wrong(problems: list[Problem]) -> None:
        forward(problems)
        problems[0].outputs["o"].view(-1)[0] += 0.01

    monkeypatch.setattr(formula, "forward", wrong)
    with pytest.raises(RuntimeError, match="the backend reference computes wrongly on cpu: o of plain in float32"):
        checked()


@pytest.mark.skipif("avx512" not in LEVELS, reason="tiles are vectors of AVX-512")
@pytest.mark.parametrize("faulty", [True, False])
def test_the_range_of_keys_that_left_its_block_is_found(
    faulty: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gradient for AMX, its tiles in C, wrote zeros past a block's keys until 0.3: dv was wrong."""
    monkeypatch.setattr(native, "processor_level", lambda: "amx")
    level, tiled = native.level, as_amx(tmp_path, faulty=faulty)
    monkeypatch.setattr(native, "level", lambda name: tiled if name == "amx" else level(name))
    device = checked()
    assert device.info.kernels["bfloat16"] == "c-amx"
    lower = [name for name in LEVELS if name != "amx"][-1]
    assert device.info.gradient_kernels["bfloat16"] == (f"c-{lower}" if faulty else "c-amx")
    assert set(device.info.kernels_off) == ({"amx.backward"} if faulty else set())


def as_amx(folder: Path, *, faulty: bool) -> native.Library:
    """Compile the gradient for AMX with the tiles in C. Return it with the forward of AVX-512 as the level `amx`."""
    command, lower = build.compiler(), native.level("avx512")
    assert command is not None
    assert lower is not None
    for path in build.HERE.glob("*.[ch]"):
        shutil.copy(path, folder)
    header = folder / "backward.h"
    mended = "    if (from >= to) from = to = 0;\n"
    text = header.read_text()
    assert mended in text
    if faulty:
        header.write_text(text.replace(mended, "    if (from >= to) to = from;\n"))
    made = folder / "tiles.so"
    flags = [*build.FLAGS, *build.X86_64["avx512"].split(), "-O1", "-DTILES_IN_C", "-DISA=tiles", "-shared"]
    subprocess.run([*command, *flags, str(folder / "backward.c"), "-o", str(made), "-lm"], check=True)
    ctypes.CDLL(str(build.HERE / build.LIBRARY), mode=ctypes.RTLD_GLOBAL)  # has the gradient for large numbers
    backward = ctypes.CDLL(str(made)).flashpoint_backward_tiles
    return native.Library(lower.bfloat16._replace(kernel="c-amx", backward=backward), lower.others)


def test_what_keeps_a_gpu_from_starting_may_pass() -> None:
    for error_text in ("CUDA error: all CUDA-capable devices are busy or unavailable", "CUDA error: out of memory"):
        assert may_pass(RuntimeError(error_text))
    assert not may_pass(RuntimeError("device cuda:3 is not available: torch finds no CUDA device"))


@pytest.mark.slow
def test_an_engine_starts_without_sympy() -> None:
    """The engine's start does not import sympy, which takes 0.5 s. torch imports it in some uses of autograd."""
    program = "import sys; from flashpoint_server.engine import self_test; self_test.start('cpu')"
    program += "; print('sympy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"
