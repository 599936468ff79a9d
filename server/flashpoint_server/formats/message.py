"""A request with tensors, in any format: the base classes of the formats, and checks of the extent of a head.

A `Format` reads requests and writes answers; a `TensorMessage` is a request that it has read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from flashpoint_contract import caches, strictjson
from flashpoint_contract.options import Direction
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import TensorInfo
from flashpoint_contract.wire import METADATA_LIMIT
from flashpoint_contract.wording.hints import each_meant
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.http.body import Part, RequestBody
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.regions import Region
from flashpoint_server.ipc.staging import NOWHERE
from flashpoint_server.plan import MessageHead, refuse_invalid
from flashpoint_server.refusal import LONGEST_NAME, MOST_ERRORS, Refusal, invalid

M = TypeVar("M", bound=BaseModel)

_FEW = 64  # maximum values of an option that is not about caches
_LONGEST = 8192  # maximum characters of a string in an option
_NUMBER = 25  # upper bound for the bytes of a float and its comma; those of -1.2345678806304932e-05 are 24


class TensorMessage(MessageHead, ABC):
    """A message with the way to its tensors."""

    in_regions = False  # whether some of its tensors, or of the answer, are in shared memory of the caller

    def elsewhere(self, spec: Spec) -> Mapping[str, tuple[Region, int]]:
        """Return (region, offset) for each tensor in the caller's shared memory, by name. Raises Refusal 422."""
        return NOWHERE

    @abstractmethod
    async def receive(self, request: Request, places: Mapping[str, memoryview]) -> None:
        """Read the tensors into `places`, to the end of the request's body. Raises Refusal."""


class Format(ABC):
    """A format of requests and answers.

    `whole`: it is text, so that the shapes are known only when the whole body is read.
    """

    whole = False

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    @abstractmethod
    async def read(
        self, request: Request, settings: Settings, codec: Codecs, direction: Direction | None
    ) -> TensorMessage:
        """Read the body until the options and shapes are known, and check the options. Raises Refusal."""

    @abstractmethod
    async def write(self, request: Request, job: Job, codec: Codecs) -> list[Part]:
        """Return the parts of the body of the answer to a request's job, in order. Raises Refusal."""


def text_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Return the maximum size of tensors as text, in bytes."""
    return _NUMBER * sum([math.prod(info.shape) for info in tensors])


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
