"""A ModelInferRequest without the bytes of its tensors, as the head that oip/head.py makes of JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from flashpoint.jsonwire import FieldError
from flashpoint_contract.tensors import TensorInfo
from flashpoint_contract.wire import WireError
from flashpoint_server.oip.datatypes import DATATYPE_OF, numpy_dtype
from flashpoint_server.oip.grpc import protos
from flashpoint_server.oip.head import (
    SHARED,
    Head,
    Input,
    Output,
    binary_of,
    make_head,
    parameters_of,
    shared_at,
    size_of,
    tensor_info,
)

RAW_INPUTS = 7  # the field of the tensors' bytes

# Where a tensor's numbers are, where they are not bytes; FP16 and BF16 have no such place.
CONTENTS = {
    "bool": "bool_contents",
    "int8": "int_contents",
    "int16": "int_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
    "uint8": "uint_contents",
    "uint16": "uint_contents",
    "uint32": "uint_contents",
    "uint64": "uint64_contents",
    "float32": "fp32_contents",
    "float64": "fp64_contents",
}

_ModelInferRequest = protos.message("inference.ModelInferRequest")


class Asked(NamedTuple):
    """An inference of a model, by its name and version, which is empty where none is named."""

    model: str
    version: str
    head: Head


def parse(text: bytes, sizes: tuple[int, ...]) -> Asked:
    """A message, and the sizes of the raw contents that were taken out of it. Raises WireError and FieldError."""
    try:
        message = _ModelInferRequest.FromString(text)
    except DecodeError:
        raise WireError("the message is no ModelInferRequest") from None
    in_numbers = any(entry.HasField("contents") for entry in message.inputs)
    if in_numbers and sizes:
        raise WireError("where there are raw_input_contents, no input has contents")
    raw = iter(sizes)
    inputs = [_input(entry, None if in_numbers else raw) for entry in message.inputs]
    if left := len(list(raw)):
        raise WireError(f"there are {len(sizes)} raw_input_contents, {left} more than inputs that they are of")
    outputs = [_output(entry) for entry in message.outputs]
    head = make_head(message.id, inputs, outputs, _values(message.parameters), binary=not in_numbers)
    if len({output.binary for output in head.outputs if output.shared is None}) > 1:
        raise FieldError("outputs", "binary_data must be the same for all: the answer is in bytes or in numbers")
    return Asked(message.model_name, message.model_version, head)


def _input(entry: Any, raw: Iterator[int] | None) -> Input:
    """`raw` are the sizes of the raw contents that follow; None where the inputs are in numbers."""
    name = entry.name
    info = tensor_info(name, list(entry.shape), entry.datatype)
    parameters = parameters_of(name, {"parameters": _values(entry.parameters)}, {"binary_data_size", *SHARED})
    shared = shared_at(name, parameters)
    said = parameters.get("binary_data_size")
    if said is not None and (raw is None or shared is not None):
        raise WireError(f"{name!r} has a binary_data_size, and does not come as raw_input_contents")
    if shared is not None:
        if entry.HasField("contents"):
            raise WireError(f"{name!r} has contents, and lies in shared memory")
        return Input(name, info, shared=shared)
    if raw is None:
        return Input(name, info, _numbers(name, info, entry.contents))
    if (size := next(raw, None)) is None:
        raise WireError(f"{name!r} has neither raw_input_contents nor contents, nor lies in shared memory")
    if size != (due := size_of(info)):
        raise WireError(f"{name!r} has {size} bytes where {entry.datatype} of its shape has {due}")
    if said is not None and said != size:
        raise WireError(f"{name!r} has a binary_data_size of {said!r} where its raw_input_contents have {size} bytes")
    return Input(name, info, size=size)


def _output(entry: Any) -> Output:
    parameters = parameters_of(entry.name, {"parameters": _values(entry.parameters)}, {"binary_data", *SHARED})
    return Output(entry.name, binary_of(parameters), shared_at(entry.name, parameters))


def _numbers(name: str, info: TensorInfo, contents: Any) -> NDArray[Any]:
    """A tensor's numbers, from the field of its datatype."""
    if (field := CONTENTS.get(info.dtype)) is None:
        raise FieldError(name, f"{DATATYPE_OF[info.dtype]} is sent as raw_input_contents")
    numbers = getattr(contents, field)
    if len(numbers) != math.prod(info.shape):
        raise FieldError(name, f"has {len(numbers)} {field}, which are not of its shape {list(info.shape)}")
    try:
        return np.fromiter(numbers, numpy_dtype(info.dtype), len(numbers)).reshape(info.shape)
    except OverflowError:
        raise FieldError(name, f"has a number that {DATATYPE_OF[info.dtype]} does not hold") from None


def _values(said: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON has them; one that says nothing is None."""
    chosen = {name: parameter.WhichOneof("parameter_choice") for name, parameter in said.items()}
    return {name: choice and getattr(said[name], choice) for name, choice in chosen.items()}
