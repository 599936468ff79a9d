"""Sizes are written in units that people read, and the largest length that fits is found."""

import pytest

from flashpoint_contract.wording.sizes import in_bytes, in_flops, longest


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1024 bytes (1 KiB)"),
        (1536, "1536 bytes (1.5 KiB)"),
        (214748364800, "214748364800 bytes (200 GiB)"),
        (1 << 60, "1152921504606846976 bytes (1,048,576 TiB)"),
    ],
)
def test_bytes_are_exact_and_in_a_unit(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (999.9, "1 kFLOP"),
        (2.36e14, "236 TFLOP"),
        (1 << 60, "1.15 EFLOP"),
        (9e22, "90,000 EFLOP"),
    ],
)
def test_operations_are_in_a_unit(count, text):
    assert in_flops(count) == text


def test_the_largest_length_that_fits_is_found():
    for most in (1, 2, 99, 100):
        assert longest(lambda length, most=most: length <= most, 101) == f"lengths of up to {most} fit"
    assert longest(lambda _: False, 101).startswith("no length fits: take fewer sequences")
    assert longest(lambda _: True, 0).startswith("no length fits")
