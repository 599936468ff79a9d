"""A request with tensors, in any format: its `RequestPlan`, and the base classes of the formats.

A `Format` reads requests and writes answers; a `TensorMessage` is a request that it has read.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import Raw
from pydantic import BaseModel, ValidationError

from flashpoint_contract import caches, saved, strictjson, wire
from flashpoint_contract.options import Direction, Options, ProblemError
from flashpoint_contract.schemas.jsonwire import FieldError
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.validation import OF_ATTENTION, field_problems
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TensorInfo, refusals
from flashpoint_contract.wire import METADATA_LIMIT
from flashpoint_contract.wording.hints import each_meant
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.http.body import Part, RequestBody
from flashpoint_server.ipc.bodies import pack_options
from flashpoint_server.ipc.job import AttentionJob, JobResult
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import Price, price_of
from flashpoint_server.ipc.regions import Region
from flashpoint_server.ipc.staging import NOWHERE, Layout
from flashpoint_server.refusal import LONGEST_NAME, MOST_ERRORS, Refusal, invalid, of_problem

M = TypeVar("M", bound=BaseModel)

SPECIAL = frozenset((*caches.CACHE_OPTIONS, *saved.SAVED_OPTIONS))  # options of calls with caches or saved forwards
_SHORT = 512  # maximum characters of options whose checked form is cached
_FEW = 64  # maximum values of an option that is not about caches
_LONGEST = 8192  # maximum characters of a string in an option
_NUMBER = 25  # upper bound for the bytes of a float and its comma; those of -1.2345678806304932e-05 are 24


class RequestPlan(NamedTuple):
    """A checked problem, with its backend and its cost estimate for `device`."""

    spec: Spec
    backend: str
    price: Price
    device: DeviceInfo
    options: Raw  # the options, encoded for the engine
    layout: Layout | None = None  # None if requests with the same plan may have different layouts


# A plain call needs nothing but its tensors. The other kinds read KV caches, save the forward, or use a saved forward.
Kind = Literal["plain", "caches", "save", "saved"]

Choose = Callable[[Spec, DeviceInfo], str]  # (problem, device) -> backend. Raises Refusal 413 and 422.


class TensorMessage(ABC):
    """A request whose options and shapes are known. Its tensors may not have arrived yet."""

    inputs: list[tuple[str, TensorInfo]]  # the tensors by name, in the order of their bytes
    surface = "safetensors"  # the format's name in the contract's `Tensor.refused`, which says why a tensor is refused
    # A cache for what routes compute from the head of a body alone. Requests with equal heads share it. None: no cache.
    derived: dict[str, Any] | None = None

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Return the options, not yet checked."""

    def kind(self, direction: Direction) -> Kind:
        options = self.options()
        if direction == "forward":
            return "save" if options.get("save") is True else "caches" if "caches" in options else "plain"
        return "plain" if options.get("saved") is None else "saved"

    def spec(self, direction: Direction) -> Spec:
        return make_spec(dict(self.inputs), self.options(), direction, self.surface)

    def plan(self, direction: Direction, device: DeviceInfo, choose: Choose) -> RequestPlan:
        """Check the problem, choose its backend and estimate its cost. Raises Refusal 413 and 422."""
        spec = self.spec(direction)
        backend = choose(spec, device)
        return RequestPlan(spec, backend, price_of(spec, backend, device), device, pack_options(spec.options))

    def elsewhere(self, spec: Spec) -> Mapping[str, tuple[Region, int]]:
        """Return (region, offset) for each tensor in the caller's shared memory, by name. Raises Refusal 422."""
        return NOWHERE

    @abstractmethod
    async def receive(self, body: RequestBody, places: Mapping[str, memoryview]) -> None:
        """Read the tensors into `places`, to the end of the body. Raises Refusal."""


class Format(ABC):
    """A format of requests and answers. `whole` says whether the shapes are known only when the whole body is read."""

    whole: bool

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    @abstractmethod
    async def read(self, body: RequestBody, settings: Settings, codec: Codecs) -> TensorMessage:
        """Read the body until the options and shapes are known. Raises Refusal."""

    @abstractmethod
    def numbers(self, spec: Spec) -> list[TensorInfo]:
        """Return the outputs that the answer contains as text, not as bytes."""

    @abstractmethod
    async def write(self, job: AttentionJob, answer: JobResult, body: RequestBody, codec: Codecs) -> list[Part]:
        """Return the parts of the answer's body, in order. Raises Refusal."""


def text_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Return the maximum size of tensors as text, in bytes."""
    return _NUMBER * sum(math.prod(info.shape) for info in tensors)


@contextmanager
def refuse_invalid(known: Iterable[str] = OF_ATTENTION) -> Iterator[None]:
    """Turn the contract's and pydantic's errors about a caller's input into Refusal 400 and 422.

    `known` are the names that the input may have.
    """
    try:
        yield
    except ValidationError as error:
        raise invalid(field_problems(error, known)) from None
    except ProblemError as error:
        raise of_problem(error) from None
    except FieldError as error:
        raise invalid([(error.field, error.message)]) from None
    except wire.WireError as error:
        raise Refusal("malformed_body", str(error)) from None


@refuse_invalid()
def make_spec(infos: Mapping[str, TensorInfo], options: Mapping[str, Any], direction: Direction, surface: str) -> Spec:
    """Return the spec of a problem that was sent in the format `surface`. Raises Refusal 422."""
    if not SPECIAL.isdisjoint(options):
        if refused := [*caches.refused(options), *saved.refused(options)]:
            raise invalid(refused)
        options = saved.plain(options)
    read = read_options(options)
    if refused := refusals(surface, [*infos, *read.given]):
        raise invalid(refused)
    return plan(infos, read, direction)


def read_options(options: Mapping[str, Any]) -> Options:
    """Return the checked options of a call. Raises ValidationError and ProblemError."""
    text = json.dumps(dict(options))
    return (_read_options if len(text) <= _SHORT else _read_options.__wrapped__)(text)


@lru_cache(256)  # a model repeats few combinations of options
def _read_options(text: str) -> Options:
    return Options(**AttentionOptions.model_validate(json.loads(text)).model_dump())


def check_extent(options: Mapping[str, Any]) -> None:
    """Check that unchecked options are few and small, so that all later work on them is short. Raises Refusal 422.

    Whatever parses options of a caller calls this.
    """
    if len(options) > METADATA_LIMIT:
        raise invalid([("", f"has {len(options)} options, over the limit of {METADATA_LIMIT}")])
    errors = []
    for name, value in options.items():
        most = 2 * caches.MOST_CACHES if name in caches.CACHE_OPTIONS else _FEW
        if len(name) > LONGEST_NAME:
            errors.append((name, f"is no option: its name has {len(name)} characters"))
        elif not _small(value, most):
            errors.append((name, f"is too large: it may have {most} values, and {_LONGEST} characters in each"))
    if errors:
        raise invalid(errors)


def _small(value: Any, most: int) -> bool:
    """Return whether a JSON value has at most `most` values, at all depths together, and strings of bounded length."""
    count, characters, left = 0, most * caches.ID_LENGTH, [value]
    while left and count <= most:
        inner = left.pop()
        count += 1
        if isinstance(inner, str):
            characters -= len(inner)
            if len(inner) > _LONGEST or characters < 0:
                return False
        if isinstance(inner, list | dict):
            if len(inner) > most:
                return False
            left += [*inner, *inner.values()] if isinstance(inner, dict) else inner
    return count <= most + 1


async def read_model(body: RequestBody, model: type[M], limit: int, codec: Codecs) -> M:
    """Return a JSON body of at most `limit` bytes as `model`.

    Raises Refusal 400, 422, 503, like `RequestBody.next`, and ClientGoneError.
    """
    body.limit = limit
    body.check_length(body.length)
    return await codec.parse(body, parse_model, await body.text(), model)


def parse_model(text: bytes, model: type[M]) -> M:
    """Return a JSON text as `model`. Raises Refusal 400 and 422."""
    try:
        document = strictjson.loads(text)
    except ValueError as error:
        raise Refusal("malformed_body", f"the body is not JSON: {error if text else 'it is empty'}") from None
    unknown = [name for name in document if name not in model.model_fields] if isinstance(document, dict) else []
    if len(unknown) > MOST_ERRORS:  # pydantic would make an error for each
        raise invalid((name, f"unknown option{hint}") for name, hint in each_meant(unknown, model.model_fields))
    with refuse_invalid(model.model_fields):
        return model.model_validate_json(text)
