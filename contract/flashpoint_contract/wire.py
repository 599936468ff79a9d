"""The head of a safetensors message: a strict parser, a builder, and options as metadata.

A message is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes, row-major, in the order of
their offsets and without gaps. The length and the JSON are the head. It describes all tensors, so a server can refuse a
message before the tensors' bytes arrive.

    {"__metadata__": {"causal": "true"}, "q": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashpoint_contract import strictjson
from flashpoint_contract.wording.hints import did_you_mean

MEDIA_TYPE = "application/vnd.safetensors"
HEAD_LIMIT = 1 << 20  # in bytes; the largest head of our own messages is under 4 KiB
METADATA_LIMIT = 64  # entries of __metadata__; `OPTIONS` has 14 options
TENSOR_LIMIT = 64  # tensors of one message; `TENSORS` has 24
RANK_LIMIT = 16
_SIZE_LIMIT = (1 << 63) - 1  # maximum of sizes and offsets: array libraries use int64

# safetensors' name -> (our name, bytes of an element). Unsupported types are listed so that errors can name them.
_DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "U16": ("uint16", 2), "I16": ("int16", 2), "F16": ("float16", 2),
    "BF16": ("bfloat16", 2), "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4), "U64": ("uint64", 8),
    "I64": ("int64", 8), "F64": ("float64", 8),
}  # fmt: skip
_CODES = {name: code for code, (name, _) in _DTYPES.items()}
ITEMSIZE = dict(_DTYPES.values())
_LITERALS = frozenset(("true", "false", "null"))  # the only JSON that begins with a letter
# json.dumps with other settings than its own makes an encoder for each call.
_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
_short_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class WireError(ValueError):
    """The bytes are not a message: they cannot be parsed."""


class TensorSpec(NamedTuple):
    """One tensor of a message: its canonical dtype (`float32`), shape, and bytes [start, stop) of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Head:
    """A parsed head. `tensors` are in file order; `size` includes the length field, but not the data (`data_size`)."""

    tensors: tuple[TensorSpec, ...]
    metadata: dict[str, str]
    size: int
    data_size: int


def head_size(first8: bytes | memoryview) -> int:
    """Return the size of the whole head from a message's first 8 bytes. Raises WireError if it exceeds `HEAD_LIMIT`."""
    if len(first8) != 8:
        raise WireError(f"a message starts with 8 bytes of length, not {len(first8)}")
    size = 8 + int.from_bytes(first8, "little")
    if size > HEAD_LIMIT:
        hint = "is this a safetensors file? its first 8 bytes are its head's length"
        raise WireError(f"a head of {size} bytes is over the limit of {HEAD_LIMIT}: {hint}")
    return size


def parse_head(head: bytes | memoryview) -> Head:
    """Parse a head, including its length field. Raises WireError for everything that is not exactly one head."""
    size = head_size(head[:8])
    if len(head) != size:
        raise WireError(f"the head has {len(head)} bytes, but its length says {size}")
    text = bytes(head[8:])
    if not text.startswith(b"{"):
        raise WireError("the head must be a JSON object")
    try:
        entries: dict[str, Any] = strictjson.loads(text)
    except ValueError as error:
        raise WireError(f"the head is not JSON: {error}") from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WireError("__metadata__ must map strings to strings")
    if len(metadata) > METADATA_LIMIT:
        raise WireError(f"{len(metadata)} metadata entries are over the limit of {METADATA_LIMIT}")
    if len(entries) > TENSOR_LIMIT:
        raise WireError(f"{len(entries)} tensors are over the limit of {TENSOR_LIMIT}")
    tensors = sorted((_tensor(name, entry) for name, entry in entries.items()), key=lambda t: (t.start, t.stop))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a gap before it"
            raise WireError(f"{tensor.name!r} {what}: it starts at {tensor.start}, not {end}")
        end = tensor.stop
    return Head(tuple(tensors), metadata, size, end)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _SIZE_LIMIT


def _tensor(name: str, entry: Any) -> TensorSpec:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"{name!r} must be an object of dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        near = did_you_mean(code, _DTYPES) if isinstance(code, str) else ""
        raise WireError(f"{name!r} has unknown dtype {code!r}; use {', '.join(_DTYPES)}{near}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise WireError(f"{name!r} has a shape that is not a list of sizes")
    if len(shape) > RANK_LIMIT:
        raise WireError(f"{name!r} has {len(shape)} dimensions, over the limit of {RANK_LIMIT}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise WireError(f"{name!r} has data_offsets that are not two sizes")
    dtype, itemsize = _DTYPES[code]
    # A size of 0 counts as 1: some array libraries refuse an empty tensor if the product of its other sizes overflows.
    if math.prod(max(n, 1) for n in shape) * itemsize > _SIZE_LIMIT:
        raise WireError(f"{name!r} has a shape that overflows")
    start, stop = offsets
    if stop - start != math.prod(shape) * itemsize:
        raise WireError(
            f"{name!r} has {stop - start} bytes, but {dtype} of its shape needs {math.prod(shape) * itemsize}"
        )
    return TensorSpec(name, dtype, tuple(shape), start, stop)


def build_head(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the head, including its length field, for `tensors` (name, canonical dtype, shape) in this order.

    Spaces pad the head, so that the data starts at a multiple of 8. Raises ValueError for a dtype that safetensors
    does not have, a repeated name, or a head over `HEAD_LIMIT`.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape in tensors:
        if name in entries or name == "__metadata__":
            raise ValueError(f"the name {name!r} is already used")
        if dtype not in _CODES:
            raise ValueError(f"{name!r} has dtype {dtype}, which safetensors does not have")
        stop = start + math.prod(shape) * ITEMSIZE[dtype]
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = _short_json(entries).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if 8 + len(text) > HEAD_LIMIT:
        raise ValueError(f"a head of {8 + len(text)} bytes is over the limit of {HEAD_LIMIT}")
    return len(text).to_bytes(8, "little") + text


def encode_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as metadata, each value in JSON. A string stays unchanged unless it would be parsed as JSON."""
    return {name: _encode(value) for name, value in options.items()}


def _encode(value: Any) -> str:
    if isinstance(value, str) and _decode(value) == value:
        return value
    return _json(value)


def decode_options(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the options in metadata: each value parsed as strict JSON, or else unchanged as a string.

    `format`, which other programs write into safetensors files, is ignored.
    """
    return {name: _decode(value) for name, value in metadata.items() if name != "format"}


def _decode(value: str) -> Any:
    if value[:1].isalpha() and value.strip() not in _LITERALS:  # no JSON: an exception would take longer
        return value
    try:
        return strictjson.loads(value)
    except ValueError:
        return value
