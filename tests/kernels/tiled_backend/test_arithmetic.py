"""Products and tanh have the same bits for one sequence alone and among others."""

import itertools

import numpy as np
import pytest
import torch

from flashpoint_kernels.problems.reproducible import exactly
from flashpoint_kernels.tiled_backend.arithmetic import add_product, product, tanh_
from tests.support.kernels.solving import normal


def test_tanh_is_exact_and_has_the_same_bits_at_each_position() -> None:
    x = torch.cat([torch.linspace(-12, 12, 100_003), torch.tensor([0.0, 1e-40, 1e30, torch.inf, -torch.inf])])
    with exactly(1):
        actual = tanh_(x.clone())
        assert all(torch.equal(tanh_(x[n:-n].clone()), actual[n:-n]) for n in range(1, 40))
        assert tanh_(torch.tensor([torch.nan])).isnan().all()
    exact = x.double().tanh()
    unit = torch.from_numpy(np.spacing(exact.abs().float().numpy()))
    assert ((actual - exact).abs() <= 2 * unit).all()


SIZES = (1, 2, 3, 9, 18, 34, 128, 300)


@pytest.mark.parametrize("rows", SIZES)
def test_a_product_has_the_same_bits_alone_and_among_others(rows):
    """Plain, added and transposed products, as in the tiles, have the same bits alone and among others."""
    for inner, columns in itertools.product(SIZES, SIZES):
        a, b, c = normal(3, rows, inner), normal(3, inner, columns, seed=1), normal(3, rows, columns, seed=2)
        layouts = [(a, b), (a.mT.contiguous().mT, b), (a, b.mT.contiguous().mT)]
        for x, y in layouts:
            results = []
            for count in (1, 2, 3):
                total = c[:count].clone()
                with exactly(1):  # one thread, as for sequences that are computed together
                    add_product(total, x[:count], y[:count])
                    results.append(torch.stack([product(x[:count], y[:count])[0], total[0]]))
            assert torch.equal(results[0], results[2]), (rows, inner, columns)
            assert torch.equal(results[1], results[2]), (rows, inner, columns)
