"""The safetensors format: a JSON head with options, names and shapes, followed by the bytes of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from flashpoint_contract import wire
from flashpoint_contract.options import Direction
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.codec import HEAD_ON_LOOP, Codecs
from flashpoint_server.formats.message import Format, TensorMessage, check_extent
from flashpoint_server.http.body import Part, RequestBody
from flashpoint_server.ipc.job import Job
from flashpoint_server.plan import CheckedCall, Named, Plan
from flashpoint_server.refusal import Refusal

OCTETS = "application/octet-stream"  # also accepted for safetensors: some callers do not know its media type


def _read(text: bytes) -> tuple[int, Named, Mapping[str, Any], dict[Direction, CheckedCall]]:
    """Parse a head: return the size of its message, the inputs, the options, and room for the checked calls.

    Requests with the same short head share these. Raises Refusal 400 and 422.
    """
    try:
        head = wire.parse_head(text)
    except wire.WireError as error:
        raise Refusal("malformed_body", str(error)) from None
    options = wire.decode_options(head.metadata)
    check_extent(options)
    inputs = tuple((t.name, TensorInfo(t.dtype, t.shape)) for t in head.tensors)
    return head.size + head.data_size, inputs, options, {}


# Parsed heads are cached, because a model sends the same heads again and again: one for each layer and KV cache, if it
# has any. Heads over _SHORT are not cached, to bound the memory: a parsed head with three tensors takes about 5 KB.
_SHORT = 4096  # maximum bytes of a cached head
_read_again = lru_cache(1024)(_read)


class SafetensorsMessage(TensorMessage):
    """A message whose head has been read, and whose tensors have not."""

    def __init__(
        self, inputs: Named, options: Mapping[str, Any], calls: dict[Direction, CheckedCall], rest: bytes
    ) -> None:
        """`rest` are the first bytes of the tensors, which arrived together with the head."""
        self.inputs, self.options, self.calls = inputs, options, calls
        self._rest = rest

    @classmethod
    async def begin(cls, body: RequestBody, head_limit: int, codec: Codecs) -> SafetensorsMessage:
        """Read the head.

        Raises like `RequestBody.next`, and Refusal 400, 422, and 413 if the body will be too large.
        """
        start = bytearray()
        size = 8
        try:
            while len(start) < size:
                chunk = await body.next()
                if not chunk:
                    raise wire.WireError(f"the body ends after {len(start)} bytes, inside its head")
                start += chunk
                if size == 8 and len(start) >= 8:
                    size = wire.head_size(bytes(start[:8]))
                    if size > head_limit:
                        raise wire.WireError(f"a head of {size} bytes exceeds the limit of {head_limit}")
        except wire.WireError as error:
            raise Refusal("malformed_body", str(error)) from None
        text = bytes(start[:size])
        if size <= _SHORT:
            total, inputs, options, calls = _read_again(text)
        else:
            total, inputs, options, calls = await codec.parse(body, _read, text, here=HEAD_ON_LOOP)
        body.check_length(total)
        if body.length not in (None, total):
            raise Refusal("malformed_body", f"the body has {body.length} bytes, but its head says {total}")
        return cls(inputs, options, calls, bytes(memoryview(start)[size:]))

    async def receive(self, body: RequestBody, places: Mapping[str, memoryview]) -> None:
        await body.into([places[name] for name, _ in self.inputs], self._rest)


class Safetensors(Format):
    """The safetensors format. An answer is sent from the memory into which the engine wrote it."""

    whole = False

    async def read(self, body: RequestBody, settings: Settings, codec: Codecs) -> TensorMessage:
        return await SafetensorsMessage.begin(body, settings.head_limit, codec)

    def numbers(self, plan: Plan) -> Iterable[TensorInfo]:
        return ()

    async def write(self, plan: Plan, job: Job, body: RequestBody, codec: Codecs) -> list[Part]:
        views, metadata = job.views(job.outputs), job.done.metadata
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
