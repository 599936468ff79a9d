"""The calibration measures a rate of this processor for each data type."""

import pytest

from flashpoint_kernels.dispatching import calibration
from flashpoint_kernels.problems import cost


def test_the_rates_of_this_processor_have_all_types() -> None:
    rates = calibration.measure("cpu")
    assert sorted(rates.types) == ["bfloat16", "float16"]
    assert all(flop > 0 for flop in (rates.flop, *rates.types.values()))


def test_an_option_without_a_nominal_figure_is_an_error_that_names_the_table(monkeypatch) -> None:
    options = {name: seconds for name, seconds in cost.NOMINAL["cpu"].options.items() if name != "softcap"}
    monkeypatch.setitem(cost.NOMINAL, "cpu", cost.NOMINAL["cpu"]._replace(options=options))
    place = (
        r"NOMINAL\['cpu'\] of flashpoint_kernels.problems.cost has no seconds for 'softcap', which has per_score=True"
    )
    with pytest.raises(LookupError, match=place):
        calibration.measure("cpu")
