"""The judge reports the sequences, heads, rows and columns of wrong elements if these form a pattern."""

import pytest
import torch

from flashpoint_kernels.judging.exact.places import index, where

SHAPE = (2, 4, 100, 16)


@pytest.mark.parametrize(
    ("axis", "places", "said"),
    [
        (0, range(2), "all elements"),
        (0, [1], "6400 of 12800 elements; sequence 1 (the last) of 2"),
        (1, [2], "3200 of 12800 elements; head 2 of 4"),
        (2, range(64, 100), "4608 of 12800 elements; rows 64 to 99 (from a multiple of 64 to the end) of 100"),
        (2, range(10, 13), "384 of 12800 elements; rows 10 to 12 of 100"),
        (2, range(1, 100, 3), "4224 of 12800 elements; every 3. row from 1 of 100"),
        (2, [3, 4, 90], "384 of 12800 elements; rows 3, 4, 90 of 100"),
        (2, [1, 2, 9, 20, 33, 50, 51], "896 of 12800 elements; 7 rows from 1 to 51 of 100"),
        (3, [15], "800 of 12800 elements; column 15 (the last) of 16"),
        (3, [], ""),
    ],
)
def test_wrong_elements_along_an_axis_are_listed_as_they_lie(axis: int, places: list[int], said: str) -> None:
    wrong = torch.zeros(SHAPE, dtype=torch.bool).index_fill_(axis, torch.tensor([*places], dtype=torch.int64), True)
    assert where(wrong, "o") == said
    assert where(wrong, "dk") == said.replace("row", "key")


def test_several_axes_are_said_together() -> None:
    wrong = torch.zeros(SHAPE, dtype=torch.bool)
    wrong[1, 2:, :32, 5] = True
    assert where(wrong, "o") == (
        "64 of 12800 elements; sequence 1 (the last) of 2; heads 2 to 3 of 4; rows 0 to 31 of 100; column 5 of 16"
    )
    assert where(wrong[..., 5], "lse") == (
        "64 of 800 elements; sequence 1 (the last) of 2; heads 2 to 3 of 4; rows 0 to 31 of 100"
    )


def test_an_element_has_the_names_of_its_axes() -> None:
    assert index((0, 3, 17, 5), "o") == "batch 0, head 3, row 17, column 5"
    assert index((0, 3, 17, 5), "dv") == "batch 0, head 3, key 17, column 5"
    assert index((0, 3, 17), "lse") == "batch 0, head 3, row 17"
    assert index((17, 3, 5), "dk", ragged=True) == "key 17, head 3, column 5"
    assert index((3, 17), "lse", ragged=True) == "head 3, row 17"
