"""The safetensors format: a JSON head with options, names and shapes, followed by the bytes of the tensors."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from functools import lru_cache
from typing import Any

from flashpoint_contract import wire
from flashpoint_contract.options import Direction
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import HEAD_ON_LOOP, Codecs
from flashpoint_server.formats.message import Format, TensorMessage, check_extent
from flashpoint_server.http.body import Part
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.job import Job
from flashpoint_server.plan import Named
from flashpoint_server.refusal import Refusal

OCTETS = "application/octet-stream"  # also accepted for safetensors: some callers do not know its media type


class SafetensorsMessage(TensorMessage):
    """A message whose head has been read. The head says that the body has `size` bytes."""

    new = True  # whether its options have not been checked

    def __init__(self, inputs: Named, options: Mapping[str, Any], size: int) -> None:
        self.inputs, self.options, self.size = inputs, options, size

    def receive(self, request: Request, places: Mapping[str, memoryview]) -> Coroutine[Any, Any, None]:
        return request.body.into([places[name] for name, _ in self.inputs], request.rest)


def _read(text: bytes, _: Direction | None) -> SafetensorsMessage:
    """Parse a head. Requests with the same short head and direction share the message. Raises Refusal 400 and 422."""
    try:
        head = wire.parse_head(text)
    except wire.WireError as error:
        raise Refusal("malformed_body", str(error)) from None
    options = wire.decode_options(head.metadata)
    check_extent(options)
    inputs = tuple((t.name, TensorInfo(t.dtype, t.shape)) for t in head.tensors)
    return SafetensorsMessage(inputs, options, head.size + head.data_size)


# Parsed heads are cached with their plans, because a model sends the same heads again and again: one for each layer and
# KV cache, if it has any. Heads over _SHORT are not cached, to bound the memory: a parsed head with three tensors takes
# about 5 KB.
_SHORT = 4096  # maximum bytes of a cached head
_read_again = lru_cache(1024)(_read)


class Safetensors(Format):
    """The safetensors format. An answer is sent from the memory into which the engine wrote it."""

    async def read(
        self, request: Request, settings: Settings, codec: Codecs, direction: Direction | None
    ) -> TensorMessage:
        """Read the head.

        Raises like `RequestBody.next`, and Refusal 400, 422, and 413 if the body will be too large.
        """
        body, start, size = request.body, bytearray(), 8
        try:
            while len(start) < size:
                chunk = await body.next()
                if not chunk:
                    raise wire.WireError(f"the body ends after {len(start)} bytes, inside its head")
                start += chunk
                if size == 8 and len(start) >= 8:
                    size += int.from_bytes(start[:8], "little")
                    if size > settings.head_limit:
                        wire.head_size(bytes(start[:8]))  # raises an error with a hint if no head is as long
                        raise wire.WireError(f"a head of {size} bytes exceeds the limit of {settings.head_limit}")
        except wire.WireError as error:
            raise Refusal("malformed_body", str(error)) from None
        text = bytes(start[:size])
        if size <= _SHORT:
            message = _read_again(text, direction)
        else:
            message = await codec.parse(body, _read, text, direction, here=HEAD_ON_LOOP)
        body.check_length(message.size)
        if body.length not in (None, message.size):
            raise Refusal("malformed_body", f"the body has {body.length} bytes, but its head says {message.size}")
        if message.new and direction is not None:
            message.check(direction)
            message.new = False
        request.rest = bytes(memoryview(start)[size:])
        return message

    async def write(self, request: Request, job: Job, codec: Codecs) -> list[Part]:
        plan, views, metadata = request.plan, job.views(job.outputs), job.done.metadata
        of_plan, kernel = metadata.keys() <= _OF_PLAN, metadata.get("kernel", "")
        if not of_plan or (head := plan.heads.get(kernel)) is None:
            tensors = [(name, info.dtype, info.shape) for name, info in plan.answers.items()]
            head = wire.build_head(tensors, wire.encode_options(metadata))
            if of_plan:
                plan.heads[kernel] = head
        return [head, *[views[name] for name in plan.answers if len(views[name])]]


_OF_PLAN = {"backend", "kernel"}  # metadata that is the same in all answers of a plan


SAFETENSORS = Safetensors(wire.MEDIA_TYPE)
SAFETENSORS_AS_OCTETS = Safetensors(OCTETS)
