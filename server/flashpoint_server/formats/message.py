"""What a request for attention says, in any format, and the formats' common interface."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from flashpoint.options import AttentionOptions
from flashpoint.validation import field_problems
from flashpoint_contract import strictjson
from flashpoint_contract.options import Direction, Options, ProblemError
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codec
from flashpoint_server.http.body import Body
from flashpoint_server.http.places import Part
from flashpoint_server.ipc.job import Answer, AttentionJob
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price, price_of
from flashpoint_server.ipc.regions import Region
from flashpoint_server.ipc.staging import NOWHERE
from flashpoint_server.refusal import Refusal, invalid

M = TypeVar("M", bound=BaseModel)

_NUMBER = 25  # most bytes of a float and its comma, such as -1.2345678806304932e-05


class Plan(NamedTuple):
    """How a problem will be computed: on which backend of `device`, at which price."""

    spec: Spec
    backend: str
    price: Price
    device: DeviceInfo


Choose = Callable[[Spec, DeviceInfo], str]  # a backend. Raises Refusal 413 and 422.


class Message(ABC):
    """A request whose options and shapes are known, and whose tensors may still be to come.

    `inputs` are name, dtype and shape of each tensor, in the order of their bytes.
    """

    inputs: list[tuple[str, TensorInfo]]

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Return the options, which are not checked yet."""

    def spec(self, direction: Direction) -> Spec:
        """Return the problem that is asked. Raises Refusal 422."""
        return make_spec(dict(self.inputs), self.options(), direction)

    def plan(self, direction: Direction, device: DeviceInfo, choose: Choose) -> Plan:
        """Return the plan of the problem. Raises Refusal 413 and 422."""
        spec = self.spec(direction)
        backend = choose(spec, device)
        return Plan(spec, backend, price_of(spec, backend, device), device)

    def elsewhere(self, spec: Spec) -> Mapping[str, tuple[Region, int]]:
        """Return the tensors in callers' own shared memory, each with its region and offset. Raises Refusal 422."""
        return NOWHERE

    @abstractmethod
    async def receive(self, body: Body, places: Mapping[str, memoryview]) -> None:
        """Bring the tensors to their places, and read the body to its end. Raises Refusal."""


class Format(ABC):
    """A way to write requests and answers. With `whole`, all of a body is read before its shapes are known."""

    whole: bool

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    @abstractmethod
    async def read(self, body: Body, settings: Settings, codec: Codec) -> Message:
        """Read as much of a body as its message takes. Raises Refusal."""

    @abstractmethod
    def numbers(self, spec: Spec) -> list[TensorInfo]:
        """Return the outputs that an answer has as text."""

    @abstractmethod
    async def write(self, job: AttentionJob, answer: Answer, codec: Codec) -> list[Part]:
        """Return the parts of an answer's body, in order."""


def text_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Return the most bytes of tensors as text, which an HTTP process holds until they are sent."""
    return _NUMBER * sum(math.prod(info.shape) for info in tensors)


def make_spec(infos: Mapping[str, TensorInfo], options: Mapping[str, Any], direction: Direction) -> Spec:
    """Return the problem that names, shapes, dtypes and options make. Raises Refusal 422."""
    try:
        checked = AttentionOptions.model_validate(options)
        return plan(infos, Options(**checked.model_dump()), direction)
    except ValidationError as error:
        raise invalid(field_problems(error)) from None
    except ProblemError as error:
        raise invalid(error.errors) from None


async def read_text(body: Body) -> bytes:
    """Read all of a body. Raises Refusal as `Body.next` does."""
    text = bytearray()
    while chunk := await body.next():
        text += chunk
    return bytes(text)


async def read_model(body: Body, model: type[M], limit: int) -> M:
    """Read a body of JSON of at most `limit` bytes. Raises Refusal 400, 422, and as `Body.next` does."""
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
