"""The JSON format: one object with options and tensors; a tensor is a nested list, or a shape with a flat list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashpoint_contract.options import Direction
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.formats.message import Format, TensorMessage, check_extent
from flashpoint_server.http.body import Part, RequestBody, copy
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.job import Job
from flashpoint_server.plan import refuse_invalid


class JsonMessage(TensorMessage):
    """A JSON request whose body has been read and parsed: its tensors are arrays in memory."""

    surface = "json"

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]], options: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self.inputs = tuple([(name, TensorInfo(array.dtype.name, array.shape)) for name, array in arrays.items()])
        self.options = options

    @classmethod
    async def parse(cls, text: bytes | memoryview, codec: Codecs, body: RequestBody) -> JsonMessage:
        """Parse the text of `body`. Raises Refusal 400, 422, 503 and 504, and ClientGoneError."""
        return cls(*await codec.run(body, _decode, text))

    async def receive(self, request: Request, places: Mapping[str, memoryview]) -> None:
        """Copy the tensors into `places`, and release their memory one by one."""
        for name, place in places.items():
            await copy(place, bytes_of(self._arrays.pop(name)))


def _decode(text: bytes) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Like `jsonwire.decode`, with options that are few and small. Raises Refusal 400 and 422."""
    with refuse_invalid():
        arrays, options = jsonwire.decode(text)
    check_extent(options)
    return arrays, options


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array in row-major order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class Json(Format):
    """The JSON format. A separate process parses and writes the text (codec.py)."""

    whole = True

    async def read(
        self, request: Request, settings: Settings, codec: Codecs, direction: Direction | None
    ) -> TensorMessage:
        message = await JsonMessage.parse(await request.body.text(), codec, request.body)
        if direction is not None:
            message.check(direction)
        return message

    async def write(self, request: Request, job: Job, codec: Codecs) -> list[Part]:
        plan, views = request.plan, job.views(job.outputs)
        arrays = {
            name: np.frombuffer(views[name], jsonwire.DTYPES.get(info.dtype, np.float32)).reshape(info.shape)
            for name, info in plan.answers.items()
        }
        return [await codec.run(request.body, jsonwire.encode, arrays, {"dtype": plan.spec.dtype, **job.done.metadata})]


JSON = Json(jsonwire.MEDIA_TYPE)
