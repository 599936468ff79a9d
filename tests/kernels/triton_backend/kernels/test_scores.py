"""The tanh of scores, and probabilities from scores and lse, are exact up to a few roundings of float32."""

import numpy as np
import torch
import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels.scores import probabilities, tanh
from tests.conftest import DEVICE


@triton.jit
def bent(source, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tanh(tl.load(source + at)))


@triton.jit
def weighted(scores, lse, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, probabilities(tl.load(scores + at), tl.load(lse + at)))


def test_tanh_is_within_few_units_in_the_last_place() -> None:
    edges = torch.tensor([0.0, -0.0, 0.625, -0.625, 1e-30, 1e30, torch.inf, -torch.inf])
    x = torch.cat([torch.linspace(-12, 12, (1 << 14) - len(edges)), edges]).to(DEVICE)
    out = torch.empty_like(x)
    with np.errstate(all="ignore"):  # branches that are not selected overflow
        bent[(len(x) // 1024,)](x, out, N=1024)
    exact = x.double().tanh().cpu()
    unit = torch.from_numpy(np.spacing(exact.abs().float().numpy())).double()
    assert ((out.cpu() - exact).abs() <= 4 * unit).all()


def test_tanh_is_odd_and_keeps_nan() -> None:
    x = torch.cat([torch.linspace(0, 12, 1023), torch.tensor([torch.nan])]).to(DEVICE)
    out, opposite = torch.empty_like(x), torch.empty_like(x)
    with np.errstate(all="ignore"):
        bent[(1,)](x, out, N=1024)
        bent[(1,)](-x, opposite, N=1024)
    assert torch.equal(out[:-1], -opposite[:-1])
    assert out[-1].isnan()


def test_a_probability_is_at_most_one_and_nan_stays_nan() -> None:
    scores = torch.tensor([0.0, 1.0, 5.0, -3.0, -torch.inf, torch.nan, 2.0, 0.0], device=DEVICE)
    lse = torch.tensor([0.0, 1.0 - 2.0**-20, 5.5, 0.0, 0.0, 0.0, torch.inf, torch.nan], device=DEVICE)
    out = torch.empty_like(scores)
    weighted[(1,)](scores, lse, out, N=8)
    expected = torch.tensor([1.0, 1.0, 2.0**-0.5, 0.125, 0.0, torch.nan, 0.0, torch.nan], device=DEVICE)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-6, atol=0)
    assert out[1] == 1.0
