"""8-bit keys and values: 8-bit numbers, and the scales by which they are multiplied."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flashpoint_contract.options import ProblemError
from flashpoint_contract.tensors import EIGHT_BIT, FLOATS
from flashpoint_kernels.problems.memory import check_memory

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # a smaller scale would be 0 on a device without subnormal numbers


def quantize(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Return `x` in 8 bits, and a scale for each of its rows: x is about values * scale[..., None].

    The largest number of a row is mapped to the largest of the dtype: 448 in float8_e4m3fn, 127 in int8. Numbers are
    rounded to the nearest. So the error of int8 is at most half a scale, and that of float8_e4m3fn is 1/16 of the
    number or 2^-10 scales.

    Args:
        x: Numbers, (..., D), such as k or v in any layout, or pages of them. float16, bfloat16, float32 or float64.
        dtype: torch.float8_e4m3fn or torch.int8.
    Returns:
        (values, scale): values in `dtype` and x's shape; scale in float32 and x's shape without D, for the arguments
        `k_scale` and `v_scale` of `attention`. A row of zeros has values of 0. A row with NaN or an infinity has a
        scale that is not finite, which `attention` refuses.
    Raises:
        ProblemError: a ValueError that names `x` or `dtype`.
    """
    if has_torch_function((x,)):
        answer: tuple[Tensor, Tensor] = handle_torch_function(quantize, (x,), x, dtype)
        return answer
    if not isinstance(x, Tensor) or str(x.dtype).removeprefix("torch.") not in FLOATS or x.ndim < 1:
        raise ProblemError([("x", f"must be a tensor (..., D) of {', '.join(FLOATS)}")])
    if dtype not in _LARGEST:
        raise ProblemError([("dtype", f"must be torch.{' or torch.'.join(EIGHT_BIT)}, not {dtype}")])
    check_memory(x=x)
    largest = _LARGEST[dtype]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    of_row = wide.abs().amax(-1) if x.shape[-1] else wide.new_zeros(x.shape[:-1])
    scale = (of_row / largest).float().clamp(min=_LEAST_SCALE)
    values = (wide / scale[..., None]).clamp(-largest, largest)
    if dtype == torch.int8:
        values = values.round().nan_to_num(0.0)
    return values.to(dtype), scale


def dequantize(values: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values * scale[..., None] in `dtype`, rounded once.

    Args:
        values: 8-bit numbers, (..., D), float8_e4m3fn or int8.
        scale: A number, or a float tensor that broadcasts to the shape of `values` without D.
        dtype: Floating-point dtype of the result.

    Returns:
        (..., D) in `dtype`.

    Raises:
        ProblemError: a ValueError that names `values` or `scale`.
    """
    if has_torch_function((values, scale)):
        answer: Tensor = handle_torch_function(dequantize, (values, scale), values, scale, dtype)
        return answer
    if not isinstance(values, Tensor) or values.dtype not in _LARGEST or values.ndim < 1:
        raise ProblemError([("values", f"must be a tensor (..., D) of {' or '.join(EIGHT_BIT)}")])
    check_memory(values=values, scale=scale)
    factor = torch.as_tensor(scale, dtype=None if isinstance(scale, Tensor) else torch.float64, device=values.device)
    try:
        factor = factor.expand(values.shape[:-1])
    except RuntimeError:
        shapes = f"{list(factor.shape)} does not broadcast to {list(values.shape[:-1])}"
        raise ProblemError([("scale", f"shape {shapes}")]) from None
    return scaled(values, factor, dtype)


def restored(values: Tensor, scale: Tensor) -> Tensor:
    """Return values * scale[..., None] in float32, for values from `quantize`: NaN only if a scale is not finite.

    On the CPU with float8_e4m3fn it takes a tenth of the time of `scaled`, for which torch converts numbers one by one.
    """
    if values.dtype == torch.float8_e4m3fn:
        # The sign, the 4 exponent bits and the 3 mantissa bits, moved to their places in a float16, give the number
        # divided by 2^8.
        bits = (values.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)
        values, scale = bits.view(torch.float16), scale * 256.0
    return torch.empty(values.shape, dtype=torch.float32, device=values.device).copy_(values).mul_(scale[..., None])


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values * scale[..., None] in `dtype`, rounded once, for any dtypes and any scales that broadcast."""
    wide = torch.promote_types(dtype, torch.float32)
    return (values.to(wide) * scale.to(wide)[..., None]).to(dtype)
