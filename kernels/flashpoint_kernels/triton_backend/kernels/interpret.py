"""Correct the errors of Triton's interpreter, in one place.

The interpreter (3.6 to 3.9) multiplies the raw 16-bit patterns of bfloat16 in `tl.dot`, and truncates float32 to
bfloat16. When interpreting, these helpers convert to float32 before a dot and round to nearest even; compiled, they are
`tl.dot` and `.to`.

The interpreter computes `tl.dot` by NumPy's BLAS. On some processors (seen on an AMD EPYC with AVX-512) the bits of a
row then depend on its place in the tile. So each row is multiplied alone.
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)

if INTERPRETED:
    from triton.runtime import interpreter

    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _multiply_rows(builder: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        """Return d + a @ b like `create_dot`; the bits of a row do not depend on its position in the tile."""
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return _create_dot(builder, a, b, d, *more)
        product = np.matmul(a.data[..., :, None, :], b.data[..., None, :, :], dtype=d.data.dtype)[..., 0, :]
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _multiply_rows


@triton.jit
def dot(a, b, acc, TF32: tl.constexpr):
    """Return acc + a @ b in float32. TF32 is only for float32 operands: they are rounded to tf32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Return float32 `x` as DTYPE, rounded to nearest even."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)
