"""FLASHPOINT_KERNELS_OFF switches off kernels and backends by name; what replaces them is right."""

from collections.abc import Callable, Iterator

import pytest
import torch

from flashpoint_kernels import Options, ProblemError, attention, available_backends, native, verify
from flashpoint_kernels.dispatching.support import Backends
from flashpoint_kernels.native import switches
from tests.kernels.conftest import LEVELS
from tests.support.kernels.solving import qkv

BEST = LEVELS[-1]
LOWER = LEVELS[-2:][0]  # equal to BEST if the processor has one level
NEEDS_TWO = pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has one level")

Switch = Callable[[str], Backends]


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """Return a function that sets the variable, as if the process began with it, and returns the CPU's backends."""

    def forget() -> None:
        native.library.cache_clear()
        available_backends.cache_clear()

    def set_(text: str) -> Backends:
        monkeypatch.setenv(switches.VARIABLE, text)
        forget()
        return available_backends("cpu")

    yield set_
    monkeypatch.undo()
    forget()


def check() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        report = verify(qkv(1, 2, 70, 150, 16, kv_heads=1, dtype=dtype), Options(causal=True, window=(40, 0)))
        assert report.ok, [e for e in report.tensors if not e.ok]


@NEEDS_TWO
@pytest.mark.parametrize("direction", switches.DIRECTIONS)
def test_one_kernel_is_replaced_by_that_of_the_next_lower_level(switch: Switch, direction: str) -> None:
    before, (lower, _, _) = native.names(), native.level(LOWER) or (None, None, None)
    backends = switch(f"{BEST}.{direction}")
    other = "backward" if direction == "forward" else "forward"
    assert lower is not None
    assert native.names(direction)["bfloat16"] == lower.kernel  # type: ignore[arg-type]
    assert native.names(other) == before  # type: ignore[arg-type]
    assert backends[:2] == ("cpu", "tiled")
    assert backends.off == {f"{BEST}.{direction}": switches.SETTING}
    check()


@NEEDS_TWO
def test_a_level_switches_off_both_directions(switch: Switch) -> None:
    switch(f" {BEST} ,, {BEST}")
    assert native.names() == native.names("backward")
    assert native.names()["bfloat16"] == f"c-{LOWER}"
    check()


@pytest.mark.parametrize(
    "off", ["cpu", ",".join(switches.LEVELS), ",".join(f"{level}.backward" for level in switches.LEVELS)]
)
def test_without_a_level_for_each_direction_the_backend_is_off(switch: Switch, off: str) -> None:
    backends = switch(off)
    assert backends[:2] == ("tiled", "reference")
    assert native.names() == native.names("backward") == {}
    with pytest.warns(RuntimeWarning, match="switched off"):
        check()
    t = torch.ones(1, 1, 2, 4)
    with pytest.raises(ProblemError, match=r"cpu is not available on this device: .* is switched off by the setting"):
        attention(t, t, t, backend="cpu")


def test_a_backend_that_is_off_is_refused_by_name_and_never_chosen(switch: Switch) -> None:
    assert "tiled" not in switch("cpu,tiled")
    t = torch.ones(1, 1, 2, 4)
    with pytest.raises(ProblemError, match="tiled is switched off by the setting FLASHPOINT_KERNELS_OFF"):
        attention(t, t, t, backend="tiled")


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(switch: Switch) -> None:
    with pytest.raises(
        ValueError, match=r"^FLASHPOINT_KERNELS_OFF: there is no kernel or backend 'amx.backwards'; give names among"
    ) as raised:
        switch("amx.backwards")
    assert all(name in str(raised.value) for name in switches.KNOWN)


def test_the_kernels_that_multiply_bfloat16_need_those_for_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switches.VARIABLE, "avx512.backward")
    assert switches.allowed(native.LEVELS, "backward") == ["avx2"]
    assert switches.allowed(native.LEVELS, "forward") == ["avx2", "avx512", "avx512bf16", "amx"]
