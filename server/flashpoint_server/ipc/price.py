"""The price of a request is its estimated cost: its floating-point operations and its predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flashpoint_contract.caches import LayerShape
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import ITEMSIZE
from flashpoint_kernels.problems.cost import Extent, extent_of, flops_of, seconds_of
from flashpoint_server.ipc.messages import DeviceInfo

MOST_FLOPS = 1 << 62  # maximum that a message can carry
# The engine's queue is ordered by arrival time plus this factor times the predicted seconds, so short requests overtake
# long ones. With 10, large requests that had waited long ran before small ones: beside four requests of 65,536
# sequences with dropout, one small request in a hundred took 0.3 to 0.5 s; with 30, under 0.1 s.
PASSED = 30.0
# Seconds in which one core reads a byte of keys or values. 8-bit values count as float32, because they are converted.
READ_SECONDS = 1e-10
_MANY = 1 << 30  # the seconds for one (query, key) pair are those predicted for this many pairs, divided by this number


class Price(NamedTuple):
    """The estimated cost of a request. `seconds` is the time on one CPU core, or on the GPU."""

    flops: int
    seconds: float


LITTLE = Price(0, 1e-5)  # the estimated cost of a call that computes no attention


def price_of(spec: Spec, backend: str, device: DeviceInfo, index: Mapping[str, Any] | None = None) -> Price:
    """Return the price of a problem. `index` has its index tensors; without them, the price is an upper bound."""
    extent = extent_of(spec, index, hidden=backend == "reference")
    return Price(min(flops_of(spec, extent.pairs), MOST_FLOPS), seconds_of(spec, device.rates[backend], extent))


class CachedRates(NamedTuple):
    """The cost of a call over caches, as a function of the caches' lengths."""

    spec: Spec
    queries: int  # number of queries in each sequence, or their mean, rounded up
    batch: int  # number of sequences
    call: float  # seconds of a call without keys
    pair: float  # seconds for each pair of a query and a key
    key: float  # seconds for reading each key and its value

    @classmethod
    def of(cls, spec: Spec, backend: str, device: DeviceInfo, layer: LayerShape) -> CachedRates:
        """Return the rates on a backend, for caches whose layer has the shape `layer`."""
        queries = spec.q_len if not spec.ragged else -(-spec.q_len // max(spec.batch, 1))
        width = ITEMSIZE["float32" if layer.quantized else layer.dtype]
        row = spec.kv_heads * (spec.head_dim + spec.value_dim) * width

        def seconds(pairs: int) -> float:
            return seconds_of(spec, device.rates[backend], Extent(spec.batch, min(spec.batch, 1), pairs))

        call = seconds(0)
        key = READ_SECONDS * row if device.name == "cpu" else 0.0
        return cls(spec, queries, spec.batch, call, (seconds(_MANY) - call) / _MANY, key)

    def price(self, lengths: Sequence[int], reads: int) -> Price:
        """Return the cost with caches of these lengths. `reads` counts the keys to read; shared keys count once."""
        pairs = self.queries * (sum(lengths) + self.batch * self.queries)
        seconds = self.call + self.pair * pairs + self.key * reads
        return Price(min(flops_of(self.spec, pairs), MOST_FLOPS), seconds)


def verification_price(spec: Spec, device: DeviceInfo) -> Price:
    """Return the price of a verification of the problem `spec`.

    It computes the problem three times: in float64, in PyTorch without fused kernels, and on the backend. With fewer
    than 64 columns of q, k and v, a score costs as many operations as with 64.
    """
    columns = spec.head_dim + spec.value_dim
    flops = min(spec.flops * max(64, columns) // columns, MOST_FLOPS)
    return Price(flops, 3 * seconds_of(spec, device.rates["reference"], extent_of(spec, hidden=True)))
