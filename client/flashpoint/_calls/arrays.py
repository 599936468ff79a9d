"""Convert numpy arrays and torch tensors to bytes and back, without a copy where the memory layout allows it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import invalid
from flashpoint_contract.options import is_integer
from flashpoint_contract.tensors import INDEX_TENSORS, SCALES, TENSORS
from flashpoint_contract.wire import ITEMSIZE, TensorSpec

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Union[NDArray[Any], "torch.Tensor"]

_OF_ML_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}

NESTED = 'is a NestedTensor: send its values with layout="thd", and its offsets as cu_seqlens_q and cu_seqlens_k'


class Packed(NamedTuple):
    """A tensor ready to send."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview  # flat bytes of contiguous memory


def is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")  # a caller who passes a tensor has imported torch
    return torch is not None and isinstance(value, torch.Tensor)


def pack(name: str, value: Any) -> Packed:
    """Return `value` as bytes to send for tensor `name`. Raises InvalidInputError if it cannot be sent."""
    if is_torch(value):
        return _pack_torch(name, value)
    number = name in TENSORS and TENSORS[name].may_be_number
    listed = isinstance(value, (list, tuple))
    if name in INDEX_TENSORS and (listed or (number and is_integer(value))):
        try:
            value = np.array(value, np.int64 if listed and not value else None)
        except (TypeError, ValueError, OverflowError):
            raise invalid(name, "must be integers of 64 bits") from None
    if name in SCALES and isinstance(value, (int, float, np.floating)) and not isinstance(value, bool):
        value = np.array(value, np.float32)
    if not isinstance(value, np.ndarray):
        kinds = (
            "a numpy array, a torch tensor or a list" if name in INDEX_TENSORS else "a numpy array or a torch tensor"
        )
        if number:
            kinds = f"{'an integer' if name in INDEX_TENSORS else 'a number'}, {kinds}"
        raise invalid(name, "is missing" if value is None else f"must be {kinds}, not {type(value).__name__}")
    if value.dtype.name not in ITEMSIZE:
        raise invalid(name, f"dtype {value.dtype} cannot be sent")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    # View the tensor as uint8, because the buffer protocol has no bfloat16.
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return Packed(value.dtype.name, value.shape, flat.data)


def _pack_torch(name: str, tensor: torch.Tensor) -> Packed:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise invalid(name, f"dtype {tensor.dtype} cannot be sent")
    if tensor.is_nested:
        raise invalid(name, NESTED)
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise invalid(name, "must be a dense tensor with memory of its own")
    whole = tensor.detach().cpu().resolve_neg().contiguous()
    # Not reshape(-1): for a tensor with one element it keeps the stride, and `view` needs a stride of 1.
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    return Packed(dtype, tuple(tensor.shape), flat.numpy().data)


def to_numpy(name: str, value: Any) -> NDArray[Any]:
    """Return `value` as a numpy array; it shares memory with a contiguous CPU tensor. Raises errors as `pack` does."""
    if isinstance(value, np.ndarray) and value.dtype.isnative and value.dtype.name in ITEMSIZE:
        return value
    dtype, shape, data = pack(name, value)
    return np.asarray(data).view(_numpy_dtype(dtype)).reshape(shape)


def to_like(array: NDArray[Any], like: Array) -> Any:
    """Return `array` unchanged if `like` is a numpy array, otherwise as a torch tensor on the device of `like`."""
    if isinstance(like, np.ndarray):
        return array
    packed = pack("answer", array)
    spec = TensorSpec("answer", packed.dtype, packed.shape, 0, packed.data.nbytes)
    return _unpack(np.asarray(packed.data), spec, like)


def unpack(buffer: NDArray[np.uint8], specs: Mapping[str, TensorSpec], like: Array) -> dict[str, Any]:
    """Return the tensors in `buffer`: numpy arrays if `like` is one, else torch tensors on its device.

    They are views of `buffer`, except tensors that are not aligned or are on another device than the CPU.
    """
    return {name: _unpack(buffer[spec.start : spec.stop], spec, like) for name, spec in specs.items()}


def _unpack(data: NDArray[np.uint8], spec: TensorSpec, like: Array) -> Any:
    if spec.start % ITEMSIZE[spec.dtype]:
        data = data.copy()  # the data is not aligned: a tensor with smaller elements precedes it
    if isinstance(like, np.ndarray):
        return data.view(_numpy_dtype(spec.dtype)).reshape(spec.shape)
    import torch

    dtype = getattr(torch, spec.dtype)
    if not data.size:  # torch cannot view an empty tensor as another dtype
        return torch.empty(spec.shape, dtype=dtype, device=like.device)
    return torch.from_numpy(data).view(dtype).reshape(spec.shape).to(like.device)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return _OF_ML_DTYPES[name] if name in _OF_ML_DTYPES else np.dtype(name)
