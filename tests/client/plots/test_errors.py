"""The picture of a verification shows a histogram of each tensor's errors, and the tensor's bound."""

import pytest

pytest.importorskip("matplotlib")
from flashpoint import VerifyReport
from flashpoint.plots import plot_verification
from flashpoint.plots.errors import histograms
from tests.support.pictures import check, laid_out, written
from tests.support.verify_answers import FIGURES


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_verification_shows_the_errors_of_each_tensor_and_its_bound(theme):
    histogram = [{"exponent": None, "count": 9}, {"exponent": -8, "count": 70}, {"exponent": -2, "count": 1}]
    good = {
        **FIGURES, "name": "o", "bound": 2e-6, "rule": "r", "ok": True, "torch": FIGURES, "histogram": histogram[:2],
    }  # fmt: skip
    bad = good | {
        "name": "dq",
        "ok": False,
        "max_abs": "Infinity",
        "histogram": [*histogram, {"exponent": 309, "count": 2}],
    }
    tight = good | {"name": "dk", "bound": 3e-12}  # smaller than all errors
    exact = good | {"name": "lse", "max_abs": 0.0, "bound": 0.0, "histogram": histogram[:1]}
    empty = exact | {"name": "dv", "histogram": []}
    about = {"backend": "tiled", "device": "cpu", "dtype": "float32", "seconds": 1, "ok": False}
    report = VerifyReport.model_validate({**about, "tensors": [good, bad, tight, exact, empty]})
    figure = laid_out(lambda: histograms(report), theme)
    check(figure)
    texts = [text for text, _ in written(figure)]
    assert "Errors: NOT all within their bounds" in texts
    assert "o: within its bound\nlargest 1.0e-07" in texts
    assert "dq: NOT within its bound\nlargest inf" in texts
    assert [texts.count(f"bound {bound}") for bound in ("2.0e-06", "3.0e-12", "0")] == [2, 1, 2]
    for ax in figure.axes:
        (bound,), zero = ax.lines, min(ax.patches, key=lambda bar: bar.get_x())
        assert zero.get_x() + zero.get_width() <= bound.get_xdata()[0] <= ax.get_xlim()[1]
    assert texts.count("∞") == 1
    assert plot_verification(report, theme=theme).startswith(b"<?xml")
