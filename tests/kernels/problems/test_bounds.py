"""The key and query ranges that `schedule` computes for arrays of tiles equal those of `bounds` for single tiles."""

import itertools

import numpy as np

from flashpoint_kernels.problems import bounds
from flashpoint_kernels.triton_backend.host import schedule


def test_the_arrays_of_bounds_are_its_numbers() -> None:
    of_arrays = {"key_range": schedule._key_range, "query_range": schedule._query_range}
    cases = list(itertools.product((0, 5), (7, 9), (-3, 0, 4), (0, 2, 1 << 30), (0, 1, 1 << 30), (0, 6, 20)))
    for name, ranges in of_arrays.items():
        actual = np.stack(ranges(*np.array(cases).T), 1).tolist()
        assert actual == [list(getattr(bounds, name)(*case)) for case in cases]
