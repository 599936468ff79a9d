"""JSON: options and tensors in one object, the tensors as nested or flat lists of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashpoint import jsonwire
from flashpoint_contract import wire
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import Arrays, Codec
from flashpoint_server.formats.message import Format, Message, read_text
from flashpoint_server.http.body import Body
from flashpoint_server.http.places import Part
from flashpoint_server.ipc.job import Answer, AttentionJob
from flashpoint_server.refusal import Refusal, invalid


class JsonMessage(Message):
    """A message that has been read whole."""

    def __init__(self, arrays: Arrays, options: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self.inputs = [(name, TensorInfo(array.dtype.name, array.shape)) for name, array in arrays.items()]
        self._options = options

    @classmethod
    async def parse(cls, text: bytes, codec: Codec, deadline: float | None) -> JsonMessage:
        """Raises Refusal 400, 422, 503 and 504. `deadline` is in `time.monotonic` seconds."""
        try:
            return cls(*await codec.decode(text, deadline))
        except wire.WireError as error:
            raise Refusal("malformed_body", str(error)) from None
        except jsonwire.FieldError as error:
            raise invalid([(error.field, error.message)]) from None

    def options(self) -> Mapping[str, Any]:
        """Return what the object has beside tensors."""
        return self._options

    async def receive(self, body: Body, places: Mapping[str, memoryview]) -> None:
        """Copy the tensors to their places; then the message has them no more."""
        for name, place in places.items():
            place[:] = bytes_of(self._arrays.pop(name))


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array, row by row."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class Json(Format):
    """See the module. JSON is read and written in a process of its own (codec.py)."""

    whole = True

    async def read(self, body: Body, settings: Settings, codec: Codec) -> Message:
        """Read all of the body. Raises Refusal."""
        return await JsonMessage.parse(await read_text(body), codec, body.deadline)

    def numbers(self, spec: Spec) -> list[TensorInfo]:
        """Return all outputs."""
        return list(spec.outputs.values())

    async def write(self, job: AttentionJob, answer: Answer, codec: Codec) -> list[Part]:
        """Return the text, as one part. Raises Refusal 503 and 504."""
        places = job.staging.outputs
        arrays = {
            name: np.frombuffer(view, jsonwire.DTYPES.get(places[name].dtype, np.dtype(np.float32))).reshape(
                places[name].shape
            )
            for name, view in job.staging.views(places).items()
        }
        return [await codec.encode(arrays, {"dtype": job.spec.dtype, **answer.metadata}, job.deadline)]


JSON = Json(jsonwire.MEDIA_TYPE)
