"""An answer as the parts of its body, in either encoding."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint import jsonwire, wire
from flashpoint_server.job import Answer, RawTensor
from flashpoint_server.negotiation import Encoding

Part = bytes | memoryview


async def encode(answer: Answer, dtype: str, encoding: Encoding) -> list[Part]:
    """The parts, in order; the tensors' are their own memory. `dtype` is that of the request's q."""
    if encoding.is_json:
        arrays = {name: _array(t) for name, t in answer.tensors.items()}
        # Text of a large answer takes seconds.
        return [await asyncio.to_thread(jsonwire.encode, arrays, {"dtype": dtype, **answer.metadata})]
    head = wire.build_head(
        [(name, t.dtype, t.shape) for name, t in answer.tensors.items()], wire.encode_options(answer.metadata)
    )
    return [head, *(t.data.data for t in answer.tensors.values() if t.data.size)]


def _array(t: RawTensor) -> NDArray[Any]:
    return t.data.view(jsonwire.DTYPES.get(t.dtype, np.dtype(np.float32))).reshape(t.shape)
