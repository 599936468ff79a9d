"""The safetensors format: a JSON head with options, names and shapes, followed by the bytes of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from flashpoint_contract import wire
from flashpoint_contract.options import Direction
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import HEAD_ON_LOOP, Codecs
from flashpoint_server.formats.message import SPECIAL, Choose, Format, Kind, RequestPlan, TensorMessage, check_extent
from flashpoint_server.http.body import Part, RequestBody
from flashpoint_server.ipc.job import AttentionJob, JobResult
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.staging import Layout
from flashpoint_server.refusal import Refusal

OCTETS = "application/octet-stream"  # also accepted for safetensors: some callers do not know its media type


@dataclass(frozen=True)
class _HeadReading:
    """A parsed head, with cached results of its checks. Requests with the same short head share it."""

    head: wire.Head
    inputs: list[tuple[str, TensorInfo]]
    options: Mapping[str, Any]  # those in `__metadata__`, parsed as JSON
    specs: dict[Direction, Spec] = field(default_factory=dict)
    plans: dict[Direction, RequestPlan] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)


def _read(text: bytes) -> _HeadReading:
    """Parse a head. Raises Refusal 400 and 422."""
    try:
        head = wire.parse_head(text)
    except wire.WireError as error:
        raise Refusal("malformed_body", str(error)) from None
    options = wire.decode_options(head.metadata)
    check_extent(options)
    return _HeadReading(head, [(t.name, TensorInfo(t.dtype, t.shape)) for t in head.tensors], options)


# Two caches of parsed heads, because a model sends the same few heads again and again. Calls over KV caches have the
# shortest heads, but a different one for each layer and KV cache, so more of these are cached. Heads over _SHORT are
# not cached, to bound the memory: a parsed head with three tensors takes about 5 KB.
_SHORT, _SHORTEST = 4096, 512  # maximum bytes of a head in each cache
_read_again = lru_cache(256)(_read)
_read_shortest_again = lru_cache(2048)(_read)


class SafetensorsMessage(TensorMessage):
    """A message whose head has been read, and whose tensors have not."""

    def __init__(self, reading: _HeadReading, rest: bytes) -> None:
        """`rest` are the first bytes of the tensors, which arrived together with the head."""
        self._reading = reading
        self._rest = rest
        self.inputs = reading.inputs
        self.derived = reading.derived

    @classmethod
    async def begin(cls, body: RequestBody, head_limit: int, codec: Codecs) -> SafetensorsMessage:
        """Read the head.

        Raises like `RequestBody.next`, and Refusal 400, 422, and 413 if the body will be too large.
        """
        start = bytearray()
        size = 8
        try:
            while len(start) < size:
                chunk = await body.next()
                if not chunk:
                    raise wire.WireError(f"the body ends after {len(start)} bytes, inside its head")
                start += chunk
                if size == 8 and len(start) >= 8:
                    size = wire.head_size(bytes(start[:8]))
                    if size > head_limit:
                        raise wire.WireError(f"a head of {size} bytes exceeds the limit of {head_limit}")
        except wire.WireError as error:
            raise Refusal("malformed_body", str(error)) from None
        text = bytes(start[:size])
        if size <= _SHORT:
            reading = (_read_shortest_again if size <= _SHORTEST else _read_again)(text)
        else:
            reading = await codec.parse(body, _read, text, here=HEAD_ON_LOOP)
        total = reading.head.size + reading.head.data_size
        body.check_length(total)
        if body.length not in (None, total):
            raise Refusal("malformed_body", f"the body has {body.length} bytes, but its head says {total}")
        return cls(reading, bytes(memoryview(start)[size:]))

    def options(self) -> Mapping[str, Any]:
        return self._reading.options

    def kind(self, direction: Direction) -> Kind:
        return "plain" if SPECIAL.isdisjoint(self._reading.head.metadata) else super().kind(direction)

    def spec(self, direction: Direction) -> Spec:
        specs = self._reading.specs
        if direction not in specs:
            specs[direction] = super().spec(direction)
        return specs[direction]

    def plan(self, direction: Direction, device: DeviceInfo, choose: Choose) -> RequestPlan:
        """Like `TensorMessage.plan`, cached with the head for one `device`."""
        plans = self._reading.plans
        if (plan := plans.get(direction)) is None or plan.device is not device:
            plan = super().plan(direction, device, choose)
            plan = plans[direction] = plan._replace(layout=Layout.of(self.inputs, plan.spec.outputs))
        return plan

    async def receive(self, body: RequestBody, places: Mapping[str, memoryview]) -> None:
        await body.into(places.values(), self._rest)


class Safetensors(Format):
    """The safetensors format. An answer is sent from the memory into which the engine wrote it."""

    whole = False

    async def read(self, body: RequestBody, settings: Settings, codec: Codecs) -> TensorMessage:
        return await SafetensorsMessage.begin(body, settings.head_limit, codec)

    def numbers(self, spec: Spec) -> list[TensorInfo]:
        return []

    async def write(self, job: AttentionJob, answer: JobResult, body: RequestBody, codec: Codecs) -> list[Part]:
        places = job.staging.outputs
        tensors = tuple((name, place.dtype, place.shape) for name, place in places.items())
        views = job.staging.views(places).values()
        metadata = tuple((name, tuple(one) if isinstance(one, list) else one) for name, one in answer.metadata.items())
        make = _head if job.body.saved is None else _head.__wrapped__  # do not cache: each saved forward has a new id
        return [make(tensors, metadata), *(view for view in views if len(view))]


@lru_cache(256)  # a model's answers have few shapes, and their `lengths` are the same in all layers of its caches
def _head(tensors: tuple[tuple[str, str, tuple[int, ...]], ...], metadata: tuple[tuple[str, Any], ...]) -> bytes:
    return wire.build_head(tensors, wire.encode_options(dict(metadata)))


SAFETENSORS = Safetensors(wire.MEDIA_TYPE)
SAFETENSORS_AS_OCTETS = Safetensors(OCTETS)
