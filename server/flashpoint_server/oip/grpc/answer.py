"""A ModelInferResponse: its head, then the tensors, sent from the memory in which the engine computed them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.http.body import Part, RequestBody
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.regions import RegionSlice
from flashpoint_server.oip.datatypes import DATATYPE_OF, numpy_dtype
from flashpoint_server.oip.grpc import protos
from flashpoint_server.oip.grpc.framing import before
from flashpoint_server.oip.grpc.request import CONTENTS
from flashpoint_server.oip.head import InferHead
from flashpoint_server.oip.models import VERSION
from flashpoint_server.plan import Plan

RAW_OUTPUTS = 6  # number of the protobuf field `raw_output_contents`: the tensors' bytes

_ModelInferResponse = protos.message("inference.ModelInferResponse")


class _RpcOutput(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    shared: RegionSlice | None


class _About(NamedTuple):
    model: str
    identity: str
    metadata: tuple[tuple[str, Any], ...]


async def encode(
    model: str,
    asked: InferHead,
    plan: Plan,
    job: Job,
    body: RequestBody,
    codec: Codecs,
) -> list[Part]:
    """Return the parts of the ModelInferResponse in order. `asked` is the request's head."""
    infos, views = plan.answers, job.views(job.outputs)
    wanted = asked.wanted(infos)
    outputs = tuple(_RpcOutput(o.name, infos[o.name].dtype, infos[o.name].shape, o.shared) for o in wanted)
    about = _About(model, asked.id, tuple(job.done.metadata.items()))
    here = [o for o in wanted if not o.shared]
    if numbers := {o.name: _array(infos[o.name], views[o.name]) for o in here if not o.binary}:
        return [await codec.run(body, _head_with, about, outputs, numbers)]
    parts: list[Part] = [_head_with(about, outputs, {}) if asked.id else _head(about, outputs)]
    # Each output has a field raw_output_contents, which is empty for a tensor in shared memory. If all outputs are in
    # shared memory, there are no such fields.
    for output in wanted if here else ():
        view = b"" if output.shared else views[output.name]
        parts += [before(RAW_OUTPUTS, len(view)), view]
    return parts


def _array(info: TensorInfo, view: memoryview) -> NDArray[Any]:
    return np.frombuffer(view, numpy_dtype(info.dtype))


@lru_cache(256)
def _head(about: _About, outputs: tuple[_RpcOutput, ...]) -> bytes:
    """Return the head of an answer without an id. It is cached, because answers have few different heads."""
    return _head_with(about, outputs, {})


def _head_with(about: _About, outputs: tuple[_RpcOutput, ...], numbers: Mapping[str, NDArray[Any]]) -> bytes:
    message = _ModelInferResponse(model_name=about.model, model_version=VERSION, id=about.identity)
    for name, value in about.metadata:
        _say(message.parameters[name], value)
    for output in outputs:
        entry = message.outputs.add(name=output.name, datatype=DATATYPE_OF[output.dtype], shape=output.shape)
        if output.shared is not None:
            _say(entry.parameters["shared_memory_region"], output.shared.region)
            _say(entry.parameters["shared_memory_byte_size"], output.shared.size)
            _say(entry.parameters["shared_memory_offset"], output.shared.offset)
        elif output.name in numbers:
            getattr(entry.contents, CONTENTS[output.dtype]).extend(numbers[output.name].tolist())
    return bytes(message.SerializeToString())


def _say(parameter: Any, value: str | int) -> None:
    if isinstance(value, str):
        parameter.string_param = value
    elif value < 1 << 63:
        parameter.int64_param = value
    else:  # a seed may need 64 bits
        parameter.uint64_param = value
