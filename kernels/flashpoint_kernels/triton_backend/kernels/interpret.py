"""Work around errors of Triton's interpreter with bfloat16, in one module.

The interpreter (3.6 to 3.9) multiplies the raw 16-bit patterns in `tl.dot` and truncates float32 to bfloat16. When
interpreting, these helpers convert to float32 before a dot and round to nearest even; compiled, they are `tl.dot` and
`.to`.
"""

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc, TF32: tl.constexpr):
    """Return acc + a @ b in float32. TF32 applies only to float32 operands: it rounds them to tf32."""
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
