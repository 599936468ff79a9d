"""Predict the time of a request, and the devices for a load, from bytes, FLOPs and the rates of server and network.

    rates = flashpoint.capacity.measure(client)
    need = flashpoint.capacity.need(flashpoint.Shape(q_heads=8, q_len=4096, head_dim=64), dtype="float32")
    prediction = flashpoint.capacity.predict(need, rates)
    print(prediction.seconds, prediction.requests_per_second, prediction.bottleneck, prediction.for_load(100))

    decode = flashpoint.Shape(q_heads=32, kv_heads=8, q_len=1, kv_len=4096, head_dim=128)
    token = capacity.need(decode, dtype="bfloat16", cached=True)  # its keys and values are on the server
    print(token.upload, capacity.cache_bytes(decode, dtype="bfloat16", layers=32))

A request passes through the stages one after another, so its time is the sum of their times. Several requests are in
different stages at once, so the rate of a server is the rate of its slowest stage. The prediction does not include
queues: near that rate, requests wait.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from flashpoint._client.client import Client
from flashpoint._shards.cut import UNBOUNDED, Band
from flashpoint.errors import invalid
from flashpoint_contract.caches import layer_tokens
from flashpoint_contract.schemas.shapes import Dtype, Shape
from flashpoint_contract.wire import ITEMSIZE

Side = Literal["forward", "backward"]

REPEATS = 7  # number of calls of a measurement; the result is the median of their times
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a server, of its device, and of the network to it.

    Args:
        call: Seconds of a minimal call to a server on the caller's host.
        upload: Bytes per second from the caller's memory to the server's, encoding and decoding included.
        download: Bytes per second from the server's memory to the caller's, likewise.
        flops: Floating-point operations of matrix products per second, forward.
        grad_flops: The same for gradients.
        memory: Bytes of keys and values that the device reads per second.
        pcie: Bytes per second, each way, between the server and its device.
        round_trip: Seconds that the network adds to a call.
        shared: Caller, server and device use the same cores, so nothing overlaps.
    """

    call: float
    upload: float
    download: float
    flops: float
    grad_flops: float
    memory: float = math.inf
    pcie: float = math.inf
    round_trip: float = 0.0
    shared: bool = False


@dataclass(frozen=True)
class Need:
    """The bytes and operations of one request.

    Args:
        side: `forward` or `backward`.
        upload: Bytes that the caller sends.
        download: Bytes that the caller receives.
        flops: Floating-point operations of the matrix products.
        keys: Bytes of k and v that the device must read at least once.
    """

    side: Side
    upload: int
    download: int
    flops: int
    keys: int


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a request.

    Args:
        stages: Seconds of one request in each stage, in order.
        shared: Caller, server and device use the same cores, so that stages do not overlap.
    """

    stages: dict[str, float]
    shared: bool = False

    @property
    def seconds(self) -> float:
        """Return the time of one request on an idle server."""
        return sum(self.stages.values())

    @property
    def bottleneck(self) -> str:
        """Return the stage that limits the requests per second."""
        return max(self._passing, key=lambda name: self.stages[name])

    @property
    def requests_per_second(self) -> float:
        """Return the largest number of requests per second of one server, its device and its link."""
        return 1 / (self.seconds if self.shared else self.stages[self.bottleneck])

    def for_load(self, requests_per_second: float) -> dict[str, int]:
        """Return how many HTTP processes, links and devices `requests_per_second` needs, if they are never idle."""
        busy = {
            "http process": self.stages["call"],
            "link": max(self.stages["upload"], self.stages["download"]),
            "device": max(self.stages[name] for name in ("to device", "compute", "from device")),
        }
        return {name: max(1, math.ceil(requests_per_second * seconds)) for name, seconds in busy.items()}

    @property
    def _passing(self) -> list[str]:
        return [name for name in self.stages if name != "round trip"]  # requests overlap in the network


def need(
    shape: Shape,
    *,
    dtype: Dtype = "float32",
    side: Side = "forward",
    causal: bool = False,
    with_forward: bool = True,
    parts: tuple[int, int] = (1, 1),
    cached: bool = False,
) -> Need:
    """Return the bytes and operations of a request.

    A product over P pairs of query and key is 2·P·D or 2·P·Dv operations: two products forward, five backward
    (FlashAttention-2, Dao 2023, Algorithms 1 and 2).

    Args:
        shape: Sizes of the problem.
        dtype: Data type of the tensors.
        side: `forward` or `backward`.
        causal: Causal mask: a query sees the keys up to its own position.
        with_forward: A gradient sends the forward's o and lse; without them the server computes the forward again.
        parts: (r, c) of a sharded call: each query is sent with every one of c parts of the keys, each key with every
            one of r parts of the queries.
        cached: The server has KV caches: the call sends only the keys and values of its new tokens, and the device
            reads those of all tokens.

    Raises:
        InvalidInputError: the arguments do not fit together.
    """
    if side not in ("forward", "backward"):
        raise invalid("side", "must be forward or backward")
    if cached and (side == "backward" or parts != (1, 1)):
        raise invalid("cached", "goes with a forward that is not cut into parts")
    if cached and shape.q_len > shape.kv_len:
        raise invalid("kv_len", "counts the new tokens too: with a cache it is at least q_len")
    s, size = shape, ITEMSIZE[dtype]
    band = Band(s.q_len, s.kv_len, s.kv_len - s.q_len, UNBOUNDED, 0 if causal else UNBOUNDED)
    pairs = band.pairs() * s.batch * s.q_heads
    queries, keys = s.batch * s.q_heads * s.q_len * parts[1], s.batch * s.kv_heads * s.kv_len * parts[0]
    kv = keys * (s.head_dim + s.value_dim) * size
    o, lse = queries * s.value_dim * size, queries * 4
    q = queries * s.head_dim * size
    if side == "forward":
        sent = kv // s.kv_len * s.q_len if cached else kv
        return Need(side, q + sent, o, 2 * pairs * (s.head_dim + s.value_dim), kv)
    flops = 2 * pairs * (3 * s.head_dim + 2 * s.value_dim)
    if with_forward:
        return Need(side, q + kv + 2 * o + lse, q + kv, flops, kv)
    return Need(side, q + kv + o, q + kv, flops + 2 * pairs * (s.head_dim + s.value_dim), kv)


def cache_bytes(shape: Shape, *, dtype: Dtype = "float32", layers: int = 1) -> int:
    """Return the bytes of one sequence's cache: `layers` of `kv_len` tokens, of the sizes in `shape` and of `dtype`."""
    token = shape.kv_heads * (shape.head_dim + shape.value_dim) * ITEMSIZE[dtype]
    return layers * layer_tokens(shape.kv_len) * token


def predict(need: Need, rates: Rates, servers: int = 1) -> Prediction:
    """Return the predicted time of one request in each stage, from its `need` and the `rates` of the server.

    `servers` is the number of servers that share one sharded call; they share the caller's link.
    """
    flops = rates.flops if need.side == "forward" else rates.grad_flops
    return Prediction(
        {
            "round trip": rates.round_trip,
            "call": rates.call,
            "upload": need.upload / rates.upload,
            "to device": need.upload / rates.pcie / servers,
            "compute": max(need.flops / flops, need.keys / rates.memory) / servers,
            "from device": need.download / rates.pcie / servers,
            "download": need.download / rates.download,
        },
        rates.shared,
    )


def measure(client: Client, dtype: Dtype = "float32", *, shared: bool = False) -> Rates:
    """Measure the rates of the server of `client`: about fifty calls of at most 32 MiB, a few seconds in all.

    `dtype` is that of the tensors that are sent. With `shared` the server computes on the caller's own cores. The
    compute time includes the transfer to the device, so `pcie` is infinite; the network's time is in `call`, so
    `round_trip` is 0. Raises the errors of `flashpoint.errors`.
    """
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, kind)

    one = zeros(1, 1, 1, 64)
    call, _ = _median(lambda: client.attention(one, one, one, with_meta=True))
    keys = zeros(1, 1, 16 * MIB // one.nbytes, 64)
    # `kv_lengths` makes the call attend to one key only, so the upload dominates its time.
    upload, _ = _median(lambda: client.attention(one, keys, keys, kv_lengths=[1], with_meta=True))
    rows, value = zeros(1, 1, 16 * MIB // (256 * kind.itemsize), 1), zeros(1, 1, 1, 256)
    download, _ = _median(lambda: client.attention(rows, rows[:, :, :1], value, q_lengths=[1], with_meta=True))
    sent = np.random.default_rng(0).standard_normal((4, 1, 8, 1024, 64)).astype(kind)
    q, k, v, do = sent
    o, lse = client.attention(q, k, v, return_lse=True)
    shape = Shape(q_heads=8, q_len=1024, head_dim=64)
    _, forward = _median(lambda: client.attention(q, k, v, with_meta=True))
    _, backward = _median(lambda: client.attention_grad(do, q, k, v, o=o, lse=lse, with_meta=True))
    long = zeros(1, 8, 2 * MIB // (64 * kind.itemsize), 64)  # 16 MiB each for k and v: reading them takes the time
    _, read = _median(lambda: client.attention(q[:, :, :1], long, long, with_meta=True))
    return Rates(
        call=call,
        upload=_rate(2 * keys.nbytes, upload - call),
        download=_rate(16 * MIB, download - call),
        flops=need(shape, dtype=dtype).flops / forward,
        grad_flops=need(shape, dtype=dtype, side="backward").flops / backward,
        memory=2 * long.nbytes / read,
        shared=shared,
    )


def _rate(nbytes: int, seconds: float) -> float:
    """Return bytes per second. Return inf if `seconds`, a difference of two measured times, is not above 0."""
    return nbytes / seconds if seconds > 0 else math.inf


def _median(call: Callable[[], tuple[Any, Any]]) -> tuple[float, float]:
    """Return the median seconds of a call, and of its compute time on the server. The first call does not count."""
    whole, compute = [], []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        _, meta = call()
        whole.append(time.perf_counter() - began)
        compute.append(meta.timings["compute"] / 1000)
    return statistics.median(whole[1:]), statistics.median(compute[1:])
