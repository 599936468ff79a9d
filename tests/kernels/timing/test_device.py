"""A device's peak rates come from its data sheet, or from measurements without the start-up time of a library."""

import pytest
import torch

from flashpoint_kernels.timing import (
    device,
)
from flashpoint_kernels.timing.clock import Slices
from flashpoint_kernels.timing.device import SHEETS
from tests.support.kernels.simulated_time import Time

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the CPU's measurements")


def test_the_start_of_a_library_is_not_taken_for_a_product_that_is_large_enough(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def product(a: torch.Tensor, _b: torch.Tensor) -> None:
        time.now_ms += (0 if sizes else 50) + (35 if len(a) >= 1024 else 0)
        sizes.append(len(a))

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(device, "PRODUCT_MS", 30.0)
    monkeypatch.setattr(device, "_products", {})
    list(device.find_peaks("cpu", "float32", Slices(20)))
    assert sizes[-1] == 1024
    assert device.peak_of("cpu", "float32").tflops == pytest.approx(2 * 1024**3 / 35 / 1e9)


def test_data_sheets_are_dense_figures() -> None:
    """Tensor-core rates in the table are without sparsity, which would double them. H100 and H200 have equal rates."""
    h100, h200 = SHEETS["NVIDIA H100 80GB HBM3"], SHEETS["NVIDIA H200"]
    assert h100.half_tflops == h200.half_tflops == 989.5
    assert {"NVIDIA RTX 4000 Ada Generation", "NVIDIA GeForce RTX 3050"} <= SHEETS.keys()
    for sheet in SHEETS.values():
        assert sheet.half_tflops > sheet.float32_tflops
        assert sheet.source
