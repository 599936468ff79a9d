"""The price of a request is its estimated cost: its floating-point operations and its predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flashpoint_contract.spec import Spec
from flashpoint_kernels.problems.cost import extent_of, flops_of, seconds_of
from flashpoint_server.ipc.messages import DeviceInfo

MOST_FLOPS = 1 << 62  # maximum that a message can carry
# The engine's queue is ordered by arrival time plus this factor times the predicted seconds, so short requests overtake
# long ones. With 10, large requests that had waited long ran before small ones: beside four requests of 65,536
# sequences with dropout, one small request in a hundred took 0.3 to 0.5 s; with 30, under 0.1 s.
PASSED = 30.0


class Price(NamedTuple):
    """The estimated cost of a request. `seconds` is the time on one CPU core, or on the GPU."""

    flops: int
    seconds: float


LITTLE = Price(0, 1e-5)  # the estimated cost of a call that computes no attention


def price_of(spec: Spec, backend: str, device: DeviceInfo, index: Mapping[str, Any] | None = None) -> Price:
    """Return the price of a problem. `index` has its index tensors; without them, the price is an upper bound."""
    extent = extent_of(spec, index, hidden=backend == "reference")
    return Price(min(flops_of(spec, extent.pairs), MOST_FLOPS), seconds_of(spec, device.rates[backend], extent))


def verification_price(spec: Spec, device: DeviceInfo) -> Price:
    """Return the price of a verification of the problem `spec`.

    It computes the problem three times: in float64, in PyTorch without fused kernels, and on the backend. With fewer
    than 64 columns of q, k and v, a score costs as many operations as with 64.
    """
    columns = spec.head_dim + spec.value_dim
    flops = min(spec.flops * max(64, columns) // columns, MOST_FLOPS)
    return Price(flops, 3 * seconds_of(spec, device.rates["reference"], extent_of(spec, hidden=True)))
