"""A switch of the default dtype between calls changes nothing: not in cached routes, and not beyond anyone's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import attention
from tests.kernels.ambient.calls import normal

Answers = list[Tensor]


@contextmanager
def default(dtype: torch.dtype, threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(before)


def decode() -> Answers:
    """Attend over 6,000 keys, whose chunks several threads share: each writes the state of its chunks."""
    q, k, v = normal(1, 2, 1, 64, seed=1), normal(1, 1, 6000, 64, seed=2), normal(1, 1, 6000, 64, seed=3)
    return [*attention(q, k, v, return_lse=True), *attention(q, k, v, return_lse=True, softcap=30.0)]


def train() -> Answers:
    """Train on lengths of 16 to 200, each of which has its route."""
    found: Answers = []
    for length in range(16, 201, 8):
        leaves = [normal(1, 2, length, 16, seed=n).requires_grad_() for n in range(3)]
        o, lse = attention(*leaves, return_lse=True)
        o.backward(normal(1, 2, length, 16, seed=4))
        found += [o, lse, *(t.grad for t in leaves if t.grad is not None)]
    return found


def many_queries() -> Answers:
    """Differentiate 5,000 queries with sinks, whose parts add to the same gradients of keys."""
    leaves = [normal(1, 2, n, 16, seed=n).requires_grad_() for n in (5000, 40, 41)]
    sinks = normal(2, seed=5).requires_grad_()
    q, k, v = leaves[0], leaves[1], leaves[2][:, :, :40]
    o = attention(q, k, v, sinks=sinks)
    return list(torch.autograd.grad(o, [*leaves, sinks], normal(1, 2, 5000, 16, seed=4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("solve", [decode, train, many_queries])
def test_calls_before_in_and_after_a_switch_have_the_same_bits(
    solve: Callable[[], Answers], dtype: torch.dtype
) -> None:
    with default(torch.float32, 2):
        before = solve()
    with default(dtype, 2):
        within = solve()
    with default(torch.float32, 2):
        after = solve()
    for x, y, z in zip(before, within, after, strict=True):
        assert x.dtype == y.dtype == z.dtype
        assert torch.equal(x, y)
        assert torch.equal(x, z)
