"""A roofline picture needs measured peaks, and says why naive attention reaches a high share of its limit."""

import pytest

pytest.importorskip("matplotlib")
from flashpoint.plots import benchmark_figure, plot_benchmark
from tests.support.pictures import laid_out, written
from tests.support.plot_rows import job, row


def test_a_roofline_says_why_naive_has_a_high_share():
    def texts_of(*backends):
        figure = laid_out(lambda: benchmark_figure(job([row(name, 512) for name in backends]), "roofline"))
        return " ".join(" ".join(text for text, _ in written(figure)).split())

    with_naive, without = texts_of("naive", "tiled"), texts_of("tiled")
    assert "% of roofline: the rate of a point over the roof above it" in with_naive
    assert "naive writes the matrix of scores, so its roof is lower" in with_naive
    assert "naive" not in without


def test_a_speedup_needs_more_than_naive_and_a_roofline_its_peaks():
    single = row("naive", 512, dtype="bfloat16")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_benchmark(job([single]), "speedup")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_benchmark(job([single]), "roofline")
