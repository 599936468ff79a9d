"""Parse a ModelInferRequest without the bytes of its tensors, into the same head as oip/head.py makes from JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from flashpoint_contract.schemas.jsonwire import FieldError
from flashpoint_contract.tensors import TensorInfo
from flashpoint_contract.wire import WireError
from flashpoint_server.oip.datatypes import DATATYPE_OF, numpy_dtype
from flashpoint_server.oip.grpc import protos
from flashpoint_server.oip.head import (
    SHARED,
    InferHead,
    Input,
    Output,
    binary_of,
    make_head,
    parameters_of,
    shared_at,
    size_of,
    tensor_info,
)

RAW_INPUTS = 7  # number of the protobuf field `raw_input_contents`: the tensors' bytes

# The field of InferTensorContents for a tensor's numbers, by dtype. FP16 and BF16 have none: they are sent as bytes.
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


class ParsedRequest(NamedTuple):
    """An inference request: the model's name, its version (empty if not given), and the request's head."""

    model: str
    version: str
    head: InferHead


def parse(text: bytes, sizes: tuple[int, ...]) -> ParsedRequest:
    """Parse a ModelInferRequest from which raw_input_contents was removed. `sizes` are the bytes of each removed value.

    Raises WireError and FieldError.
    """
    try:
        message = _ModelInferRequest.FromString(text)
    except DecodeError:
        raise WireError("the message is not a ModelInferRequest") from None
    in_numbers = any(entry.HasField("contents") for entry in message.inputs)
    if in_numbers and sizes:
        raise WireError("use either raw_input_contents or contents, not both")
    raw = iter(sizes)
    inputs = [_input(entry, None if in_numbers else raw) for entry in message.inputs]
    if left := len(list(raw)):
        raise WireError(f"there are {len(sizes)} raw_input_contents, {left} more than the inputs need")
    outputs = [_output(entry) for entry in message.outputs]
    head = make_head(message.id, inputs, outputs, _values(message.parameters), binary=not in_numbers)
    if len({output.binary for output in head.outputs if output.shared is None}) > 1:
        raise FieldError("outputs", "binary_data must be the same for all: the answer is in bytes or in numbers")
    return ParsedRequest(message.model_name, message.model_version, head)


def _input(entry: Any, raw: Iterator[int] | None) -> Input:
    """Parse an input. `raw` yields the sizes of raw_input_contents; None means that all inputs are sent as numbers."""
    name = entry.name
    info = tensor_info(name, list(entry.shape), entry.datatype)
    parameters = parameters_of(name, {"parameters": _values(entry.parameters)}, {"binary_data_size", *SHARED})
    shared = shared_at(name, parameters)
    stated = parameters.get("binary_data_size")
    if stated is not None and (raw is None or shared is not None):
        raise WireError(f"{name!r} has a binary_data_size, but is not in raw_input_contents")
    if shared is not None:
        if entry.HasField("contents"):
            raise WireError(f"{name!r} has contents, but is in shared memory")
        return Input(name, info, shared=shared)
    if raw is None:
        return Input(name, info, _numbers(name, info, entry.contents))
    if (size := next(raw, None)) is None:
        raise WireError(f"{name!r} has no raw_input_contents, no contents, and is not in shared memory")
    if size != (due := size_of(info)):
        raise WireError(f"{name!r} has {size} bytes, but {entry.datatype} of its shape needs {due}")
    if stated is not None and stated != size:
        raise WireError(f"{name!r} has a binary_data_size of {stated!r}, but its raw_input_contents have {size} bytes")
    return Input(name, info, size=size)


def _output(entry: Any) -> Output:
    parameters = parameters_of(entry.name, {"parameters": _values(entry.parameters)}, {"binary_data", *SHARED})
    return Output(entry.name, binary_of(parameters), shared_at(entry.name, parameters))


def _numbers(name: str, info: TensorInfo, contents: Any) -> NDArray[Any]:
    """Return a tensor's numbers from `contents`, which has a field for each datatype. Raises FieldError."""
    if (field := CONTENTS.get(info.dtype)) is None:
        raise FieldError(name, f"{DATATYPE_OF[info.dtype]} must be sent as raw_input_contents")
    numbers = getattr(contents, field)
    if len(numbers) != math.prod(info.shape):
        raise FieldError(name, f"has {len(numbers)} {field}, which do not fit its shape {list(info.shape)}")
    try:
        return np.fromiter(numbers, numpy_dtype(info.dtype), len(numbers)).reshape(info.shape)
    except OverflowError:
        raise FieldError(name, f"has a number out of the range of {DATATYPE_OF[info.dtype]}") from None


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return protobuf parameters as JSON values, by name. A parameter without a value is None."""
    chosen = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: choice and getattr(parameters[name], choice) for name, choice in chosen.items()}
