"""Sequences that share a part of their keys give the same output bits as each sequence alone."""

from typing import Any

import pytest
import torch

from tests.conftest import INTERPRETING
from tests.support.kernels.shared_pages import check

UNIT = 1 if INTERPRETING else 16  # a factor of all lengths: the tiles of a GPU have more keys than the interpreter's


@pytest.mark.parametrize(
    ("dtype", "kind", "group", "options"),
    [
        (torch.float32, None, 1, {}),
        pytest.param(torch.bfloat16, None, 4, {"softcap": 2.0}, marks=pytest.mark.slow),
        (torch.float16, torch.int8, 1, {"window": (90 * UNIT, 0)}),
        pytest.param(torch.bfloat16, torch.float8_e4m3fn, 2, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_forks_have_the_bits_of_each_alone(
    dtype: torch.dtype, kind: torch.dtype | None, group: int, options: dict[str, Any]
) -> None:
    shared, own = [0, 160, 128, 100], [200, 7, 40, 64]
    sizes = ([n * UNIT for n in lengths] for lengths in (shared, own))
    check(*sizes, 16, 1, group, dtype, kind, "triton", **options)


def test_parts_that_begin_alike_and_end_apart_are_not_shared() -> None:
    """A part is not shared with a sequence that has the same pages, but ends in the middle of the part."""
    check([0, 160 * UNIT, 160 * UNIT], [160 * UNIT, 90 * UNIT, 91 * UNIT], 16, 1, 2, torch.float32, None, "triton")
