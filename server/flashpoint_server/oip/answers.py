"""The answer to an inference: its JSON, then the tensors, sent from the memory in which the engine computed them."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashpoint_contract.schemas import jsonwire
from flashpoint_server.formats.codec import Codecs
from flashpoint_server.formats.safetensors import OCTETS
from flashpoint_server.http.body import Part, RequestBody
from flashpoint_server.ipc.job import Job
from flashpoint_server.ipc.regions import RegionSlice
from flashpoint_server.ipc.staging import ALIGNMENT
from flashpoint_server.oip.datatypes import DATATYPE_OF, numpy_dtype
from flashpoint_server.oip.head import InferHead
from flashpoint_server.oip.inflated import WINDOW_BITS
from flashpoint_server.oip.models import VERSION
from flashpoint_server.plan import Plan

# zlib's compression level. Floating-point numbers hardly compress at any level, so use the fastest.
_LEVEL = 1


class _HttpOutput(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int | None  # bytes after the JSON; None if the JSON contains the numbers
    shared: RegionSlice | None


async def encode(
    model: str,
    asked: InferHead,
    plan: Plan,
    job: Job,
    body: RequestBody,
    codec: Codecs,
) -> tuple[list[Part], dict[str, str]]:
    """Return the parts of the answer's body in order, and the header fields that describe the body.

    `asked` is the request's head.
    """
    infos, views = plan.answers, job.views(job.outputs)
    outputs = tuple(
        _HttpOutput(name, infos[name].dtype, infos[name].shape, infos[name].nbytes if binary else None, shared)
        for name, binary, shared in asked.wanted(plan.answers)
    )
    about = (model, asked.id, tuple(job.done.metadata.items()))
    if numbers := {o.name: _array(o, views[o.name]) for o in outputs if o.size is None and not o.shared}:
        head = await codec.run(body, _head_with, about, outputs, numbers)
    else:  # answers have few different heads, so these are cached, except those with an id, which is new each time
        head = _head_with(about, outputs, {}) if asked.id else _head(about, outputs)
    behind = [o for o in outputs if o.size is not None and not o.shared]
    parts: list[Part] = [head, *(views[o.name] for o in behind if o.size)]
    if not behind:
        return parts, {"content-type": jsonwire.MEDIA_TYPE}
    return parts, {"content-type": OCTETS, "inference-header-content-length": str(len(head))}


def _array(output: _HttpOutput, view: memoryview) -> NDArray[Any]:
    return np.frombuffer(view, numpy_dtype(output.dtype)).reshape(output.shape)


_About = tuple[str, str, tuple[tuple[str, Any], ...]]


@lru_cache(256)
def _head(about: _About, outputs: tuple[_HttpOutput, ...]) -> bytes:
    return _head_with(about, outputs, {})


def _head_with(about: _About, outputs: tuple[_HttpOutput, ...], numbers: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the JSON of an answer, padded with spaces so that the tensors are aligned in a client's buffer."""
    model, identity, metadata = about
    listed = []
    for output in outputs:
        entry: dict[str, Any] = {"name": output.name, "datatype": DATATYPE_OF[output.dtype], "shape": output.shape}
        if output.shared is not None:
            region = {"shared_memory_region": output.shared.region, "shared_memory_byte_size": output.shared.size}
            if output.shared.offset:
                region["shared_memory_offset"] = output.shared.offset
            listed.append({**entry, "parameters": region})
        elif output.size is None:
            listed.append({**entry, "data": jsonwire.listed(numbers[output.name])})
        else:
            listed.append({**entry, "parameters": {"binary_data_size": output.size}})
    document = {"model_name": model, "model_version": VERSION, "parameters": dict(metadata), "outputs": listed}
    if identity:
        document["id"] = identity
    text = json.dumps(document, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


async def compressed(parts: list[Part], coding: str) -> list[Part]:
    """Return the parts, compressed with `coding`: gzip or deflate. A thread does this, because it takes long."""

    def deflate() -> bytes:
        deflated = zlib.compressobj(_LEVEL, wbits=WINDOW_BITS[coding])
        return b"".join([*(deflated.compress(part) for part in parts), deflated.flush()])

    return [await asyncio.to_thread(deflate)]
