"""`errors` measures the differences of each backend's answers from PyTorch's and from float64."""

from __future__ import annotations

from flashpoint_kernels.reproduction.errors import BOUND, errors
from tests.conftest import DEVICE


def test_errors_are_those_from_pytorch_and_from_float64() -> None:
    measured = errors(str(DEVICE))
    assert {"cpu", "tiled"} <= measured.keys()
    for tensors in measured.values():
        assert tensors.keys() == {"o", "dq", "dk", "dv"}
        for f in tensors.values():
            assert 0 < f["exact"] <= max(BOUND, f["its"])
            assert f["torch"] <= f["exact"] + f["its"]
