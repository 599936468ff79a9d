"""The JSON format: one object with options and tensors; a tensor is a nested list, or a shape with a flat list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Codec
from flashpoint_server.formats.message import Format, TensorMessage, refuse_invalid
from flashpoint_server.http.body import Part, RequestBody
from flashpoint_server.ipc.job import AttentionJob, JobResult


class JsonMessage(TensorMessage):
    """A JSON request whose body has been read and parsed: its tensors are arrays in memory."""

    surface = "json"

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]], options: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self.inputs = [(name, TensorInfo(array.dtype.name, array.shape)) for name, array in arrays.items()]
        self._options = options

    @classmethod
    async def parse(cls, text: bytes, codec: Codec, deadline: float | None) -> JsonMessage:
        """Parse a body, by `deadline` in `time.monotonic` seconds. Raises Refusal 400, 422, 503 and 504."""
        with refuse_invalid():
            return cls(*await codec.run(deadline, jsonwire.decode, text))

    def options(self) -> Mapping[str, Any]:
        return self._options

    async def receive(self, body: RequestBody, places: Mapping[str, memoryview]) -> None:
        """Copy the tensors into `places`, and release their memory one by one."""
        for name, place in places.items():
            place[:] = bytes_of(self._arrays.pop(name))


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array in row-major order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class Json(Format):
    """The JSON format. A separate process parses and writes the text (codec.py)."""

    whole = True

    async def read(self, body: RequestBody, settings: Settings, codec: Codec) -> TensorMessage:
        return await JsonMessage.parse(await body.text(), codec, body.deadline)

    def numbers(self, spec: Spec) -> list[TensorInfo]:
        return list(spec.outputs.values())

    async def write(self, job: AttentionJob, answer: JobResult, codec: Codec) -> list[Part]:
        places = job.staging.outputs
        views = job.staging.views(places)
        arrays = {
            name: np.frombuffer(views[name], jsonwire.DTYPES.get(place.dtype, np.float32)).reshape(place.shape)
            for name, place in places.items()
        }
        metadata = {"dtype": job.spec.dtype, **answer.metadata}
        return [await codec.run(job.deadline, jsonwire.encode, arrays, metadata)]


JSON = Json(jsonwire.MEDIA_TYPE)
