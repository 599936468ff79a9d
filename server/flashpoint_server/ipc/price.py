"""The price of a request: its floating-point operations, and its predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flashpoint_contract.spec import Spec
from flashpoint_kernels.cost import extent_of, flops_of, seconds_of
from flashpoint_server.ipc.messages import DeviceInfo

MOST_FLOPS = 1 << 62  # that a message can carry
# A request's rank is later than its arrival by this many times its predicted seconds. Shorter requests that come within
# that time pass it. With 10, large requests that had waited for each other came before small ones: beside four of
# 65,536 sequences with dropout, one small request in a hundred took 0.3 to 0.5 s; with 30, under 0.1 s.
PASSED = 30.0


class Price(NamedTuple):
    """`seconds` are of one core of the CPU, or of the GPU."""

    flops: int
    seconds: float


def price_of(spec: Spec, backend: str, device: DeviceInfo, index: Mapping[str, Any] | None = None) -> Price:
    """Return the price of a problem: of the lengths in its index tensors, or, without them, the highest it may have."""
    extent = extent_of(spec, index, hidden=backend == "reference")
    return Price(min(flops_of(spec, extent.pairs), MOST_FLOPS), seconds_of(spec, device.rates[backend], extent))


def proof_price(spec: Spec, device: DeviceInfo) -> Price:
    """Return the price of verifying a problem: a gradient in float64 and in torch's own arithmetic, and the backend's.

    A score costs about as many operations as 64 columns do, however few there are.
    """
    columns = spec.head_dim + spec.value_dim
    flops = min(spec.flops * max(64, columns) // columns, MOST_FLOPS)
    return Price(flops, 3 * seconds_of(spec, device.rates["reference"], extent_of(spec, hidden=True)))
