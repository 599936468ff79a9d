"""From a body to the message it carries: options and shapes from its head, checked before the tensors are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from flashpoint import jsonwire, strictjson, wire
from flashpoint.options import AttentionOptions
from flashpoint.validation import field_problems
from flashpoint_kernels.spec import Direction, Options, ProblemError, Spec, TensorInfo, plan
from flashpoint_server.formats.codec import Arrays, Codec
from flashpoint_server.http.body import Body
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price, price_of
from flashpoint_server.refusal import Refusal, invalid

M = TypeVar("M", bound=BaseModel)


def make_spec(infos: Mapping[str, TensorInfo], options: Mapping[str, Any], direction: Direction) -> Spec:
    """The problem that names, shapes, dtypes and options make. Raises Refusal 422."""
    try:
        checked = AttentionOptions.model_validate(options)
        return plan(infos, Options(**checked.model_dump()), direction)
    except ValidationError as error:
        raise invalid(field_problems(error)) from None
    except ProblemError as error:
        raise invalid(error.errors) from None


class Plan(NamedTuple):
    """How a problem will be computed: on which backend of `device`, at which price."""

    spec: Spec
    backend: str
    price: Price
    device: DeviceInfo


@dataclass(frozen=True)
class _Reading:
    """A head, and the problems it was found to ask for. Shared between requests: nothing in it changes."""

    head: wire.Head
    specs: dict[Direction, Spec] = field(default_factory=dict)
    plans: dict[Direction, Plan] = field(default_factory=dict)


def _read(text: bytes) -> _Reading:
    return _Reading(wire.parse_head(text))


# A model sends the same few heads again and again. A long one is read anew: that bounds what is remembered.
_SHORT = 4096  # bytes
_read_again = lru_cache(256)(_read)


class SafetensorsMessage:
    """A message whose head has been read, and whose tensors are still to come."""

    def __init__(self, reading: _Reading, rest: bytes) -> None:
        self._reading = reading
        self._rest = rest  # what arrived together with the head

    @classmethod
    async def begin(cls, body: Body, head_limit: int) -> SafetensorsMessage:
        """Read the head. Raises Refusal 400, and 413 where the head promises more than the body's limit."""
        start = bytearray()
        size = 8
        try:
            while len(start) < size:
                chunk = await body.next()
                if not chunk:
                    raise wire.WireError(f"the body ends after {len(start)} bytes, within the head")
                start += chunk
                if size == 8 and len(start) >= 8:
                    size = wire.head_size(bytes(start[:8]))
                    if size > head_limit:
                        raise wire.WireError(f"a head of {size} bytes is over the limit of {head_limit}")
            text = bytes(start[:size])
            reading = _read_again(text) if size <= _SHORT else _read(text)
        except wire.WireError as error:
            raise Refusal("malformed_body", str(error)) from None
        total = reading.head.size + reading.head.data_size
        body.check_length(total)
        if body.length not in (None, total):
            raise Refusal("malformed_body", f"the body has {body.length} bytes where its head says {total}")
        return cls(reading, bytes(memoryview(start)[size:]))

    def spec(self, direction: Direction) -> Spec:
        """What the head asks. Raises Refusal 422."""
        head, specs = self._reading.head, self._reading.specs
        if direction not in specs:
            specs[direction] = make_spec(dict(self.inputs()), wire.decode_options(head.metadata), direction)
        return specs[direction]

    def plan(self, direction: Direction, device: DeviceInfo, choose: Callable[[Spec, DeviceInfo], str]) -> Plan:
        """Return the plan of the problem: the one made before for this head and `device`, else a new one.

        `choose` returns the backend. Raises Refusal 413 and 422.
        """
        plans = self._reading.plans
        if (plan := plans.get(direction)) is None or plan.device is not device:
            spec = self.spec(direction)
            backend = choose(spec, device)
            plan = plans[direction] = Plan(spec, backend, price_of(spec, backend, device), device)
        return plan

    @property
    def metadata(self) -> dict[str, str]:
        return self._reading.head.metadata

    def inputs(self) -> list[tuple[str, TensorInfo]]:
        """Name, dtype and shape of each tensor, in the order of their bytes."""
        return [(t.name, TensorInfo(t.dtype, t.shape)) for t in self._reading.head.tensors]

    async def receive(self, body: Body, places: Iterable[memoryview]) -> None:
        """Read the tensors into their places, to the end of the body. Raises Refusal."""
        await body.into(places, self._rest)


async def read_json(body: Body, codec: Codec) -> tuple[Arrays, dict[str, Any]]:
    """The tensors and options of a JSON message, all of it read. Raises Refusal."""
    return await decode_json(await read_text(body), codec, body.deadline)


async def read_text(body: Body) -> bytes:
    """All of a body. Raises Refusal as `Body.next` does."""
    text = bytearray()
    while chunk := await body.next():
        text += chunk
    return bytes(text)


async def read_model(body: Body, model: type[M], limit: int) -> M:
    """What a body of JSON says, of at most `limit` bytes. Raises Refusal 400, 422, and as `Body.next` does."""
    body.limit = limit
    body.check_length(body.length)
    text = await read_text(body)
    try:
        strictjson.loads(text)
        return model.model_validate_json(text)
    except ValidationError as error:
        raise invalid(field_problems(error)) from None
    except ValueError as error:
        raise Refusal("malformed_body", f"the body is not JSON: {error}") from None


async def decode_json(text: bytes, codec: Codec, deadline: float | None) -> tuple[Arrays, dict[str, Any]]:
    """The tensors and options of a JSON message. Raises Refusal 400, 422, 503 and 504."""
    try:
        return await codec.decode(text, deadline)
    except wire.WireError as error:
        raise Refusal("malformed_body", str(error)) from None
    except jsonwire.FieldError as error:
        raise invalid([(error.field, error.message)]) from None
