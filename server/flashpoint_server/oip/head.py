"""The head of an inference request, which precedes the bytes of its tensors. Over HTTP it is JSON:

    {"id": "…",
     "parameters": {"causal": true, "window_left": 128},
     "inputs": [{"name": "q", "shape": [8, 64], "datatype": "FP16", "parameters": {"binary_data_size": 1024}}, …],
     "outputs": [{"name": "o", "parameters": {"binary_data": true}}]}

It contains the same information as a safetensors head. A tensor may also be given as numbers, in `data`. A bad head
raises WireError (it is not such a JSON object) or FieldError (one of its fields is not valid).

grpc/request.py parses the same information from protobuf.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from flashpoint_contract import strictjson
from flashpoint_contract.options import OPTIONS, Direction, Names, Options, Pair
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.jsonwire import FieldError
from flashpoint_contract.tensors import ANSWERS, TENSORS, TensorInfo
from flashpoint_contract.wire import ITEMSIZE, RANK_LIMIT, TENSOR_LIMIT, WireError
from flashpoint_contract.wording.hints import did_you_mean
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.message import check_extent
from flashpoint_server.ipc.regions import RegionSlice
from flashpoint_server.oip.datatypes import DTYPE_OF, numpy_dtype
from flashpoint_server.plan import apart, checked_options
from flashpoint_server.refusal import invalid

# A parameter has one value, so an option that is a pair, such as `window`, is sent as two parameters with these names.
SIDES = {
    name: tuple(f"{name}_{side}" for side in option.kind.sides)
    for name, option in OPTIONS.items()
    if isinstance(option.kind, Pair)
}
PRIORITY_LEVELS = 10  # as in Triton, level 1 is the highest: it is our priority 9, and level 10 is our priority 0
_KEYS = {"id", "model_name", "model_version", "parameters", "inputs", "outputs"}
SHARED = {"shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"}
_SIZE_LIMIT = (1 << 63) - 1


class Input(NamedTuple):
    """An input: its numbers are in the head (`array`), in `shared` memory, or in `size` bytes that follow the head."""

    name: str
    info: TensorInfo
    array: NDArray[Any] | None = None
    shared: RegionSlice | None = None
    size: int = 0


class Output(NamedTuple):
    """An output that a request lists. `binary` is None if the request does not set it."""

    name: str
    binary: bool | None = None
    shared: RegionSlice | None = None


class Wanted(NamedTuple):
    """An output of the answer: numbers in the head, or bytes after the head (`binary`), or in `shared` memory."""

    name: str
    binary: bool
    shared: RegionSlice | None = None


@dataclass(frozen=True, eq=False)
class InferHead:
    """The head of a request.

    `outputs` lists the requested outputs; empty means all. `binary` says whether outputs are bytes if `outputs` is
    empty. `timeout` is in microseconds; 0 means none. `priority` is from 0 to 9; 9 is the most urgent.
    """

    id: str
    inputs: tuple[Input, ...]
    outputs: tuple[Wanted, ...]
    options: dict[str, Any]
    binary: bool
    timeout: int
    priority: int
    options_of: dict[Direction, tuple[Options, int | None]] = field(default_factory=dict)  # those that are checked

    @property
    def in_regions(self) -> bool:
        """Whether an input or an output is in shared memory of the caller."""
        return any([given.shared for given in self.inputs] + [wanted.shared for wanted in self.outputs])

    @property
    def data_size(self) -> int:
        """The number of bytes that follow the head."""
        return sum(given.size for given in self.inputs)

    def checked(self, direction: Direction) -> tuple[Options, int | None]:
        """Return the checked options, and the dropout seed apart. Raises Refusal 422.

        A requested output sets the option that it needs.
        """
        if direction not in self.options_of:
            known = [name for name in ANSWERS[direction] if "oip" not in TENSORS[name].refused]
            if unknown := [output.name for output in self.outputs if output.name not in known]:
                raise invalid([("outputs", f"{unknown[0]!r} is not one of {', '.join(known)}")])
            names = [output.name for output in self.outputs]
            implied: dict[str, Any] = {}
            if names:
                implied = {"return_lse": "lse" in names} if direction == "forward" else {"grads": names}
            given = [given.name for given in self.inputs]
            options, _ = checked_options(given, implied | self.options, direction, "plain", "oip")
            self.options_of[direction] = apart(options)
        return self.options_of[direction]

    def deadline(self, settings: Settings) -> float | None:
        """Return the deadline from `timeout`, in `time.monotonic` seconds; None if there is none."""
        seconds = min(self.timeout / 1e6, settings.max_timeout_ms / 1e3)
        return time.monotonic() + seconds if seconds else None

    def wanted(self, answers: Iterable[str]) -> tuple[Wanted, ...]:
        """Return the outputs that the answer contains, in order: those of `outputs`, or all `answers` of the plan.

        Raises Refusal 422.
        """
        if missing := [output.name for output in self.outputs if output.name not in answers]:
            raise invalid([("outputs", f"{missing[0]!r} is requested, but the parameters exclude it")])
        return self.outputs or tuple(Wanted(name, self.binary) for name in answers)


def parse(text: bytes) -> InferHead:
    """Parse the JSON of a head. Raises WireError and FieldError."""
    try:
        message = strictjson.loads(text, words=True)
    except ValueError as error:
        raise WireError(f"the request is not JSON: {error}") from None
    message = _object("the request", message, _KEYS)
    inputs = [_input(entry) for entry in _list("inputs", message.get("inputs"))]
    outputs = [_output(entry) for entry in _list("outputs", message.get("outputs", []))]
    for key in ("id", "model_name", "model_version"):
        if not isinstance(message.get(key, ""), str):
            raise WireError(f"{key} must be a string")
    return make_head(message.get("id", ""), inputs, outputs, parameters_of("parameters", message), binary=False)


def make_head(
    identity: str, inputs: Sequence[Input], outputs: Sequence[Output], parameters: dict[str, Any], *, binary: bool
) -> InferHead:
    """Return the head with these inputs, outputs and parameters. Raises WireError and FieldError.

    `binary` is the default of the parameter binary_data_output.
    """
    binary = _flag("binary_data_output", parameters.pop("binary_data_output", binary))
    timeout = _count("timeout", parameters.pop("timeout", 0), _SIZE_LIMIT)
    level = _count("priority", parameters.pop("priority", 0), PRIORITY_LEVELS)
    for what, names in (("inputs", [i.name for i in inputs]), ("outputs", [o.name for o in outputs])):
        if len(names) > TENSOR_LIMIT:
            raise WireError(f"{len(names)} {what} exceed the limit of {TENSOR_LIMIT}")
        if twice := [name for name in names if names.count(name) > 1]:
            raise FieldError(what, f"{twice[0]!r} appears twice")
    wanted = tuple(Wanted(o.name, binary if o.binary is None else o.binary, o.shared) for o in outputs)
    priority = PRIORITY_LEVELS - level if level else 0
    return InferHead(identity, tuple(inputs), wanted, _options(parameters), binary, timeout, priority)


def _options(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a problem from the parameters that set them, with pairs and lists. Raises FieldError."""
    check_extent(parameters)
    for name, value in parameters.items():
        if not isinstance(value, str | int | float):
            raise FieldError(name, "must be a string, a number, true or false")
    for name, sides in SIDES.items():
        if name in parameters:
            raise FieldError(name, f"is not a parameter: use {' and '.join(sides)}")
        if any(side in parameters for side in sides):
            defaults = zip(sides, OPTIONS[name].default, strict=True)
            parameters[name] = [parameters.pop(side, default) for side, default in defaults]
    for name, option in OPTIONS.items():
        if name in parameters and isinstance(option.kind, Names):
            parameters[name] = [word.strip() for word in str(parameters[name]).split(",")]
    return parameters


def _input(entry: Any) -> Input:
    entry = _object("an input", entry, {"name", "shape", "datatype", "parameters", "data"})
    name, shape, datatype = entry.get("name"), entry.get("shape"), entry.get("datatype")
    if not isinstance(name, str):
        raise WireError("an input has no name")
    info = tensor_info(name, shape, datatype)
    parameters = parameters_of(name, entry, {"binary_data_size", *SHARED})
    shared = shared_at(name, parameters)
    if ("data" in entry) + ("binary_data_size" in parameters) + (shared is not None) != 1:
        raise WireError(f"{name!r} must have data or a binary_data_size, or be in shared memory")
    if shared is not None:
        return Input(name, info, shared=shared)
    if "data" in entry:
        return Input(name, info, _numbers(name, info, entry["data"]))
    size, due = parameters["binary_data_size"], size_of(info)
    if type(size) is not int or size != due:
        raise WireError(f"{name!r} has a binary_data_size of {size!r}, but {datatype} of its shape needs {due}")
    return Input(name, info, size=size)


def size_of(info: TensorInfo) -> int:
    """Return the size of a tensor in bytes, also for dtypes that attention does not support."""
    return math.prod(info.shape) * ITEMSIZE[info.dtype]


def tensor_info(name: str, shape: Any, datatype: Any) -> TensorInfo:
    """Return dtype and shape of an input from `shape` and `datatype` in its JSON entry. Raises FieldError."""
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= _SIZE_LIMIT for n in shape):
        raise FieldError(name, "shape must be a list of sizes")
    if len(shape) > RANK_LIMIT:
        raise FieldError(name, f"has {len(shape)} dimensions, over the limit of {RANK_LIMIT}")
    if not isinstance(datatype, str) or datatype not in DTYPE_OF:
        near = did_you_mean(datatype, DTYPE_OF) if isinstance(datatype, str) else ""
        raise FieldError(name, f"datatype {datatype!r} is not one of {', '.join(DTYPE_OF)}{near}")
    dtype = DTYPE_OF[datatype]
    # Sizes of 0 are left out of the product: array libraries need a product of the other sizes that does not overflow.
    if math.prod(max(n, 1) for n in shape) * ITEMSIZE[dtype] > _SIZE_LIMIT:
        raise FieldError(name, "has a shape that overflows")
    return TensorInfo(dtype, tuple(shape))


def _numbers(name: str, info: TensorInfo, data: Any) -> NDArray[Any]:
    """Return a tensor's numbers from a flat or nested list, in its shape. Raises FieldError."""
    if not isinstance(data, list):
        raise FieldError(name, "data must be a list")
    nested, flat = jsonwire.elements(name, data)
    if nested not in (info.shape, (math.prod(info.shape),)):
        raise FieldError(name, f"data of shape {list(nested)} does not fit its shape {list(info.shape)}")
    return jsonwire.array(name, flat, numpy_dtype(info.dtype)).reshape(info.shape)


def _output(entry: Any) -> Output:
    entry = _object("an output", entry, {"name", "parameters"})
    name = entry.get("name")
    if not isinstance(name, str):
        raise WireError("an output has no name")
    parameters = parameters_of(name, entry, {"binary_data", *SHARED})
    return Output(name, binary_of(parameters), shared_at(name, parameters))


def binary_of(parameters: dict[str, Any]) -> bool | None:
    """Return whether an output's parameters request it as bytes; None if they do not say. Raises FieldError."""
    return _flag("binary_data", parameters["binary_data"]) if "binary_data" in parameters else None


def shared_at(name: str, parameters: dict[str, Any]) -> RegionSlice | None:
    """Return a tensor's location in shared memory from its parameters, if any. Raises FieldError."""
    if not parameters.keys() & SHARED:
        return None
    region = parameters.get("shared_memory_region")
    if not isinstance(region, str) or "shared_memory_byte_size" not in parameters:
        raise FieldError(name, "in shared memory needs a shared_memory_region and a shared_memory_byte_size")
    offset, size = (
        _count(f"{name}.shared_memory_{what}", parameters.get(f"shared_memory_{what}", 0), _SIZE_LIMIT)
        for what in ("offset", "byte_size")
    )
    return RegionSlice(region, offset, size)


def _object(what: str, value: Any, known: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"{what} must be a JSON object")
    if unknown := [key for key in value if key not in known]:
        raise WireError(f"{what} has an unknown field {unknown[0]!r}")
    return value


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(f"{what} must be a list")
    return value


def parameters_of(owner: str, entry: dict[str, Any], known: Iterable[str] | None = None) -> dict[str, Any]:
    """Return a copy of the parameters in `entry`. Raises WireError, and FieldError for one that is not in `known`.

    If `known` is None, all parameters are allowed. `owner` names the entry in errors.
    """
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise WireError(f"parameters of {owner!r} must be a JSON object")
    if known is not None and (unknown := [key for key in parameters if key not in known]):
        raise FieldError(owner, f"parameter {unknown[0]!r} is unknown")
    return dict(parameters)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(name, "must be true or false")
    return value


def _count(name: str, value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise FieldError(name, f"must be an integer from 0 to {limit}")
    return value
