"""At its start, an engine checks its backends against `reference`; some failures of a start may be retried."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint_kernels.tiled_backend import tiles
from flashpoint_server.engine.execution.device import TorchDevice
from flashpoint_server.engine.self_test import check_backends, may_pass


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_backend_that_computes_wrongly_is_not_served(direction, monkeypatch):
    """The check fails if one element of one output of a backend is wrong by 0.01, as after a miscompilation."""
    compute = getattr(tiles, direction)

    def miscompiled(problems):
        compute(problems)
        next(reversed(problems[0].outputs.values())).view(-1)[-1] += 0.01

    monkeypatch.setattr(tiles, direction, miscompiled)
    with pytest.raises(RuntimeError, match="the tiled backend disagrees with the reference on cpu"):
        check_backends(TorchDevice.open("cpu"))


def test_what_keeps_a_gpu_from_starting_may_pass():
    for error_text in ("CUDA error: all CUDA-capable devices are busy or unavailable", "CUDA error: out of memory"):
        assert may_pass(RuntimeError(error_text))
    assert not may_pass(RuntimeError("device cuda:3 is not available: torch finds no CUDA device"))


@pytest.mark.slow
def test_an_engine_starts_without_sympy():
    """The engine's start does not import sympy, which takes 0.5 s. torch imports it in some uses of autograd."""
    program = "import sys; from flashpoint_server.engine import self_test; self_test.start('cpu')"
    program += "; print('sympy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"
