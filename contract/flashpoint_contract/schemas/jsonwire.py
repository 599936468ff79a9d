"""Encode and decode messages, the bodies of requests and answers, as JSON: an object of options and of tensors.

    {"q": [[0.5, 1.0]], "k": {"shape": [0, 2], "data": []}, "v": …, "dtype": "float32", "causal": true}

Tensors are nested lists. `WireError` means that a message is not a JSON object, `FieldError` that it is one, but has a
field that is not valid. NaN and infinities are the strings "NaN", "Infinity" and "-Infinity", because JSON has no such
numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashpoint_contract import strictjson
from flashpoint_contract.strictjson import WORDS
from flashpoint_contract.tensors import TENSORS
from flashpoint_contract.wire import RANK_LIMIT, WireError

MEDIA_TYPE = "application/json"

# Largest depth of lists and objects in a field that is not a tensor; the contract's fields need one level. Python could
# parse deeper values, but could not pickle them to send them from the codec process to the HTTP process.
FIELD_DEPTH = 8

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_ONES_AND_ZEROS = (
    "holds only 0 and 1: write true and false to hide keys; numbers are added to scores, write 1.0 to add 1"
)


class FieldError(ValueError):
    """The message is JSON, but `field` is not valid; `message` says why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # unpickling calls the class with these arguments
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def decode(body: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the tensors of a message by name, and its other fields.

    q, k, v, do, o and the gradients of q, k and v have the message's `dtype` (default: float32; bfloat16 is that of
    ml_dtypes). Masks of booleans are bool. Lengths and cu_seqlens are int64. All other tensors are float32. Raises
    WireError if `body` is not a JSON object. Raises FieldError if a tensor is ragged, has elements other than numbers,
    or has numbers outside the range of its dtype.
    """
    try:
        message = strictjson.loads(body)
    except ValueError as error:
        raise WireError(f"the body is not JSON: {error if body else 'it is empty'}") from None
    if not isinstance(message, dict):
        raise WireError("the body must be a JSON object")
    dtype = message.pop("dtype", "float32")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FieldError("dtype", f"must be one of {', '.join(DTYPES)}")
    tensors = {name: _array(name, message.pop(name), dtype) for name in sorted(TENSORS.keys() & message.keys())}
    for name, value in message.items():
        if _deeper(value, FIELD_DEPTH):
            raise FieldError(name, f"has more than {FIELD_DEPTH} lists or objects within one another")
    return tensors, message


def _deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested deeper than `levels`."""
    inner = [value]
    for _ in range(levels + 1):
        inner = [x for x in inner if isinstance(x, list | dict)]
        inner = [x for outer in inner for x in (outer.values() if isinstance(outer, dict) else outer)]
    return bool(inner)


def _array(name: str, value: Any, dtype: str) -> NDArray[Any]:
    shape, flat = elements(name, value)
    row = TENSORS[name]
    kinds = set(map(type, flat)) if "bool" in row.dtypes else set()
    if name == "attn_mask" and kinds == {int} and {1} <= set(flat) <= {0, 1}:
        raise FieldError(name, _ONES_AND_ZEROS)
    if row.dtypes == ("bool",) or ("bool" in row.dtypes and kinds == {bool}):
        target: np.dtype[Any] = np.dtype(np.bool_)
    elif row.is_index:
        target = np.dtype(np.int64)
    else:
        target = DTYPES[dtype] if row.like_q else DTYPES["float32"]
    return array(name, flat, target).reshape(shape)


def array(name: str, flat: list[Any], target: np.dtype[Any]) -> NDArray[Any]:
    """Return elements as a flat array of dtype `target`. Raises FieldError for a wrong type or range."""
    kinds = set(map(type, flat))
    if type(None) in kinds:
        raise FieldError(name, "holds null in the place of a value")
    if target.kind == "b":
        if not kinds <= {bool}:
            raise FieldError(name, "must hold booleans alone")
        return np.array(flat, target)
    if target.kind in "iu":
        if not kinds <= {int}:
            raise FieldError(name, "must hold integers alone")
        try:
            return np.array(flat, target)
        except OverflowError:
            raise FieldError(name, f"holds an integer beyond {8 * target.itemsize} bits") from None
    if not kinds <= {int, float, str}:
        other = ", or booleans alone" if name in TENSORS and "bool" in TENSORS[name].dtypes else ""
        raise FieldError(name, f"must hold numbers alone{other}")
    if str in kinds:
        if any(isinstance(x, str) and x not in WORDS for x in flat):
            raise FieldError(name, 'holds a string other than "NaN", "Infinity" and "-Infinity"')
        numbers = [x for x in flat if not isinstance(x, str)]
        flat = [WORDS[x] if isinstance(x, str) else x for x in flat]
    else:
        numbers = flat
    try:
        # A number that overflows becomes infinite here, and is refused below. An infinity in the message is allowed.
        with np.errstate(over="ignore"):
            finite = np.isfinite(np.array(numbers, np.float64).astype(target)).all()
            converted: NDArray[Any] = np.array(flat, np.float64).astype(target)
    except OverflowError:
        finite = np.False_
    if not finite:
        raise FieldError(name, f"holds a number beyond {target.name}")
    return converted


def elements(name: str, value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and the elements (row-major) of nested lists, {"shape": …, "data": …}, or one number."""
    if isinstance(value, dict):
        if value.keys() != {"shape", "data"}:
            raise FieldError(name, "an object must have shape and data")
        shape, data = value["shape"], value["data"]
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise FieldError(name, "shape must be a list of sizes")
        if len(shape) > RANK_LIMIT:
            raise FieldError(name, f"has more than {RANK_LIMIT} dimensions")
        if math.prod(max(n, 1) for n in shape) >= 1 << 60:  # longer integers may be too long to print in an error
            raise FieldError(name, "has a shape that overflows")
        if not isinstance(data, list) or len(data) != math.prod(shape):
            raise FieldError(name, f"data must be a list of {math.prod(shape)} elements")
        return tuple(shape), data
    may_be_number = name in TENSORS and TENSORS[name].may_be_number
    if may_be_number and type(value) in (int, float):
        return (), [value]
    if not isinstance(value, list):
        number = "an integer, " if name in TENSORS and TENSORS[name].is_index else "a number, "
        kinds = f"{number if may_be_number else ''}nested lists"
        raise FieldError(name, f"must be {kinds}, or an object of shape and data")
    sizes, level = [len(value)], value
    while level and isinstance(level[0], list):
        size = len(level[0])
        if not all(isinstance(row, list) and len(row) == size for row in level):
            raise FieldError(name, f"is ragged: its lists at depth {len(sizes) + 1} differ in length")
        sizes.append(size)
        if len(sizes) > RANK_LIMIT:
            raise FieldError(name, f"has more than {RANK_LIMIT} dimensions")
        level = [x for row in level for x in row]
    return tuple(sizes), level


def encode(tensors: Mapping[str, NDArray[Any]], fields: Mapping[str, Any]) -> bytes:
    """Return the JSON message that has `tensors` and `fields`.

    Tensors are nested lists, or an object of shape and data if they are empty or have no dimension. Numbers have the
    fewest digits that read back as the same float32, or float64 for a float64 tensor. So decoding a message that has
    its `dtype` in `fields` gives the same bits.
    """
    message = {**fields, **{name: _lists(array) for name, array in tensors.items()}}
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def _lists(array: NDArray[Any]) -> Any:
    flat = listed(array)
    if array.size == 0 or array.ndim == 0:
        return {"shape": list(array.shape), "data": flat}
    for size in reversed(array.shape[1:]):
        flat = [flat[i : i + size] for i in range(0, len(flat), size)]
    return flat


def listed(array: NDArray[Any]) -> list[Any]:
    """Return the elements in row-major order: numbers, booleans, and strings for numbers that are not finite."""
    if array.dtype.kind in "biu":
        whole: list[Any] = array.ravel().tolist()
        return whole
    if array.dtype != np.float64:
        # Convert through text, to get 0.1 instead of the float32's exact value 0.10000000149011612.
        numbers = [float(x) for x in array.astype(np.float32).ravel().astype(str).tolist()]
    else:
        numbers = array.ravel().tolist()
    return list(map(strictjson.written, numbers))
