"""What the makers of some GPUs say of them: to stand beside what is measured, not in its place."""

from __future__ import annotations

from typing import NamedTuple


class Sheet(NamedTuple):
    """A GPU's data sheet: TFLOP/s of dense 16-bit products with float32 sums, and of float32 without tf32; GB/s."""

    half_tflops: float
    float32_tflops: float
    gb_per_s: float
    source: str


# By the name that CUDA gives them.
SHEETS = {
    "NVIDIA A100-SXM4-80GB": Sheet(312, 19.5, 2039, "NVIDIA A100 data sheet"),
    "NVIDIA A100 80GB PCIe": Sheet(312, 19.5, 1935, "NVIDIA A100 data sheet"),
    "NVIDIA A100-SXM4-40GB": Sheet(312, 19.5, 1555, "NVIDIA A100 data sheet"),
    "NVIDIA A100-PCIE-40GB": Sheet(312, 19.5, 1555, "NVIDIA A100 data sheet"),
    "NVIDIA H100 80GB HBM3": Sheet(989.5, 67, 3350, "NVIDIA H100 data sheet, SXM; half of its figure with sparsity"),
    "NVIDIA H100 PCIe": Sheet(756.5, 51, 2000, "NVIDIA H100 data sheet, PCIe; half of its figure with sparsity"),
    "NVIDIA H200": Sheet(989.5, 67, 4800, "NVIDIA H200 data sheet, SXM; half of its figure with sparsity"),
    "NVIDIA L40S": Sheet(362.05, 91.6, 864, "NVIDIA L40S data sheet"),
    "NVIDIA GeForce RTX 4090": Sheet(165.2, 82.6, 1008, "NVIDIA Ada GPU Architecture white paper"),
    "NVIDIA B200": Sheet(
        2250, 75, 8000, "NVIDIA HGX B200 data sheet; an eighth of it, half of its figure with sparsity"
    ),
}
