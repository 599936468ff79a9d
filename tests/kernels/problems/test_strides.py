"""`empty_like` and `laid_like` give an output the stride order of an input; `laid_like` copies only if it must."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_kernels.problems.strides import empty_like, laid_like
from tests.support.kernels.solving import normal

orders = st.permutations([0, 1, 2, 3])
sizes = st.tuples(*[st.integers(1, 4)] * 4)


def laid(shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    """Return a tensor of this shape with the dimensions in this order in memory, from the largest stride."""
    return normal(*(shape[dim] for dim in order)).permute([order.index(dim) for dim in range(4)])


def order_of(t: torch.Tensor) -> list[int]:
    """Return the dimensions that have more than one element, from the largest stride."""
    return sorted((dim for dim in range(t.ndim) if t.shape[dim] > 1), key=lambda dim: -t.stride(dim))


@given(shape=sizes, order=orders, columns=st.integers(2, 5))
def test_rows_lie_in_the_order_of_the_input_with_their_columns_innermost(
    shape: tuple[int, ...], order: list[int], columns: int
) -> None:
    t = laid(shape, order)
    made = empty_like(t, (*shape[:3], columns), torch.float64)
    assert (made.shape, made.dtype) == ((*shape[:3], columns), torch.float64)
    assert made.untyped_storage().nbytes() == made.numel() * 8, "dense"
    assert made.stride(-1) == 1
    assert [dim for dim in order_of(made) if dim < 3] == [dim for dim in order_of(t) if dim < 3]


@given(shape=sizes, order=orders)
def test_an_answer_is_copied_only_where_columns_are_not_innermost(shape: tuple[int, ...], order: list[int]) -> None:
    t = laid(shape, order)
    answer = empty_like(t, shape).copy_(normal(*shape, seed=1))
    moved = laid_like(answer, t)
    assert torch.equal(moved, answer)
    assert order_of(moved) == order_of(t)
    innermost = order_of(t)[-1:] in ([], [3]) or shape[3] == 1
    assert (moved is answer) == innermost


def test_expanded_inputs_have_contiguous_answers() -> None:
    t = normal(2, 1, 3, 4).expand(2, 5, 3, 4)
    assert empty_like(t, (2, 5, 3, 8)).is_contiguous()
