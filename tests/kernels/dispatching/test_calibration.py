"""The calibration measures a rate of this processor for each data type."""

from flashpoint_kernels.dispatching import calibration


def test_the_rates_of_this_processor_have_all_types() -> None:
    rates = calibration.measure("cpu")
    assert sorted(rates.types) == ["bfloat16", "float16"]
    assert all(flop > 0 for flop in (rates.flop, *rates.types.values()))
