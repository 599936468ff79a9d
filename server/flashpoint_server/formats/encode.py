"""An answer as the parts of its body, in either encoding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from flashpoint import jsonwire, wire
from flashpoint_kernels.spec import TensorInfo
from flashpoint_server.formats.codec import Codec
from flashpoint_server.formats.negotiation import Encoding
from flashpoint_server.http.places import Part
from flashpoint_server.ipc.job import Answer, AttentionJob

_NUMBER = 25  # most bytes of a float and its comma, such as -1.2345678806304932e-05


async def encode(job: AttentionJob, answer: Answer, encoding: Encoding, codec: Codec) -> list[Part]:
    """The parts, in order; in safetensors the tensors' are the memory that they were computed into."""
    places = job.staging.outputs
    views = job.staging.views(places)
    if encoding.is_json:
        arrays = {
            name: np.frombuffer(views[name], jsonwire.DTYPES.get(place.dtype, np.dtype(np.float32))).reshape(
                place.shape
            )
            for name, place in places.items()
        }
        return [await codec.encode(arrays, {"dtype": job.spec.dtype, **answer.metadata}, job.deadline)]
    tensors = tuple((name, place.dtype, place.shape) for name, place in places.items())
    return [_head(tensors, tuple(answer.metadata.items())), *(view for view in views.values() if len(view))]


def text_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Most bytes of tensors in JSON, which an HTTP process holds until they are sent."""
    return _NUMBER * sum(math.prod(info.shape) for info in tensors)


@lru_cache(256)
def _head(tensors: tuple[tuple[str, str, tuple[int, ...]], ...], metadata: tuple[tuple[str, str | int], ...]) -> bytes:
    """Kept, for a model's answers are of few shapes."""
    return wire.build_head(tensors, wire.encode_options(dict(metadata)))
