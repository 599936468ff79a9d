"""Matrix products and roundings to 16 bits are right under the interpreter, as in compiled kernels."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels.interpret import cast, dot
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def rounded(source, out, N: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, cast(tl.load(source + at), DTYPE))


@triton.jit
def product(a, b, c, out, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None] * N, tl.arange(0, N)[None, :]
    total = dot(tl.load(a + rows + columns), tl.load(b + rows + columns), tl.load(c + rows + columns), False)
    tl.store(out + rows + columns, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """Ties, overflows, infinities and NaN are rounded to nearest even. Subnormal inputs are not tested."""
    bits = torch.arange(1 << 12, dtype=torch.int32) << 20
    every = torch.cat([bits + more for more in (0, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000)]).view(torch.float32)
    every = every.masked_fill(every.isnan(), torch.nan).masked_fill(every.abs() < 2.0**-126, 0.0)
    x = torch.cat([every, normal(1 << 13).cpu()]).to(DEVICE)
    out = torch.empty_like(x, dtype=dtype)
    with np.errstate(all="ignore"):  # some numbers overflow the type
        rounded[(len(x) // 256,)](x, out, N=256, DTYPE=DTYPES[dtype])
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.nan_to_num(0.0, 7.0, -7.0), x.to(dtype).nan_to_num(0.0, 7.0, -7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_summed_in_float32(dtype: torch.dtype) -> None:
    a, b = (normal(32, 32, seed=n, dtype=dtype) for n in range(2))
    c = normal(32, 32, seed=2)
    out = torch.empty_like(c)
    product[(1,)](a, b, c, out, N=32)
    exact = c.double() + a.double() @ b.double()
    assert (out - exact).abs().max() <= 2.0**-20 * (c.double().abs() + a.double().abs() @ b.double().abs()).max()


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_each_place_of_a_tile(dtype: torch.dtype, size: int) -> None:
    """Equal rows of a tile give equal bits, as on a tensor core. A BLAS may use other code for a matrix's last rows."""
    a = normal(1, size, seed=0, dtype=dtype).expand(size, size).contiguous()
    b, c = normal(size, size, seed=1, dtype=dtype), torch.zeros(size, size, device=DEVICE)
    out = torch.empty_like(c)
    product[(1,)](a, b, c, out, N=size)
    assert torch.equal(out, out[:1].expand_as(out))
