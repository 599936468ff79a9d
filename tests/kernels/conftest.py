"""Fixtures for kernel tests. Interpreted runs use a faster version of Triton's interpreter and one for Gluon."""

import ctypes
import subprocess
from typing import Any

import pytest
import torch

from flashpoint_kernels import native
from flashpoint_kernels.native import build
from tests.conftest import INTERPRETING
from tests.support.kernels import fast_interpreter, gluon_interpreter

if INTERPRETING:
    gluon_interpreter.install()
    fast_interpreter.install()

FOUND = native.library()
BEST = FOUND.bfloat16.kernel.removeprefix("c-") if FOUND else "generic"
LEVELS = native.LEVELS[: native.LEVELS.index(BEST) + 1] if BEST in native.LEVELS else (BEST,)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the kernels in C use the instruction set of this parameter, and return its name."""
    functions = native.level(request.param)
    assert functions is not None
    monkeypatch.setattr(native, "library", lambda: functions)
    return str(request.param)


@pytest.fixture
def hopper_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set FLASHPOINT_HOPPER=1, so that problems may use the Triton kernels for Hopper GPUs."""
    monkeypatch.setenv("FLASHPOINT_HOPPER", "1")


@pytest.fixture
def stores_ds(hopper_path: None, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set FLASHPOINT_STORE_DS=1, so that gradients for Hopper store dS, and fill all new memory with NaN."""
    monkeypatch.setenv("FLASHPOINT_STORE_DS", "1")


@pytest.fixture
def stores_ds_in_general(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set FLASHPOINT_STORE_DS=1 for the general kernels, without the path for Hopper; fill new memory with NaN."""
    monkeypatch.setenv("FLASHPOINT_STORE_DS", "1")
    monkeypatch.setenv("FLASHPOINT_HOPPER", "0")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all new memory with NaN."""
    empty = torch.empty

    def filled(*shape: Any, **keywords: Any) -> torch.Tensor:
        made = empty(*shape, **keywords)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture(scope="session")
def lanes_of_four(tmp_path_factory: pytest.TempPathFactory) -> native.Library:
    """Return the C kernels for processors without a known instruction set, built with vectors of four floats."""
    command = build.compiler()
    assert command is not None
    made = tmp_path_factory.mktemp("narrow") / "narrow.so"
    sources = [str(build.HERE / f"{name}.c") for name in build.KERNELS]
    subprocess.run([*command, *build.FLAGS, "-DISA=narrow", "-shared", *sources, "-o", str(made)], check=True)
    loaded = ctypes.CDLL(str(made))
    names = native.Functions._fields[1:]
    narrow = native.Functions("c-narrow", *(loaded[f"flashpoint_{name}_narrow"] for name in names))
    return native.Library(narrow, narrow)
