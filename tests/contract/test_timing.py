"""A measured time is noisy if its 20th and 80th percentiles differ by more than a fifth of its median."""

import pytest

from flashpoint_contract.timing import NOISY, is_noisy


@pytest.mark.parametrize(
    ("ms", "p20", "p80", "noisy"),
    [
        (10.0, 9.0, 11.0, False),
        (10.0, 9.0, 11.01, True),
        (10.0, 0.0, 10 * NOISY, False),
        (0.001, 0.001, 0.002, True),
        (None, 1.0, 9.0, False),
        (10.0, None, 90.0, False),
        (10.0, 1.0, None, False),
        (0.0, 0.0, 1.0, False),
    ],
)
def test_a_time_is_noisy_above_a_fifth_of_the_median(ms, p20, p80, noisy):
    assert is_noisy(ms, p20, p80) is noisy
