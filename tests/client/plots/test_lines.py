"""One row makes a picture, speed-up pictures have a line at 1, and rows without figures raise ValueError."""

import pytest

pytest.importorskip("matplotlib")
from flashpoint.plots import KINDS, benchmark_figure, plot_benchmark
from tests.support.pictures import check, laid_out, pixels, written
from tests.support.plot_rows import SKIPPED, job, row


@pytest.mark.parametrize("kind", ["time", "speedup", pytest.param("tflops", marks=pytest.mark.slow), "roofline"])
def test_one_row_is_a_picture(kind):
    figure = laid_out(lambda: benchmark_figure(job([row("tiled", 512)]), kind), "dark")
    check(figure)
    assert len(figure.axes) == 1
    if kind != "roofline":
        assert len(figure.axes[0].patches) == 1
    assert figure.get_facecolor() != (1, 1, 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_benchmark_without_figures_has_no_picture(kind):
    for rows in ([], [SKIPPED]):
        with pytest.raises(ValueError, match="nothing to plot"):
            plot_benchmark(job(rows), kind)


@pytest.mark.parametrize("lengths", [(512,), (512, 1024)])
def test_speedups_have_a_line_at_1_above_the_bars(lengths):
    rows = [row(b, n) for b in ("naive", "tiled", "sdpa_flash") for n in lengths]
    figure = laid_out(lambda: benchmark_figure(job(rows), "speedup"))
    check(figure)
    (ax,) = figure.axes
    assert "1: as fast as naive" in {text for text, _ in written(figure)}
    picture = pixels(figure)
    x, y = ax.transData.transform((1, 1)).round().astype(int)
    (x0, y0), (x1, y1) = ax.bbox.min.round().astype(int), ax.bbox.max.round().astype(int)
    line = picture[y0:y1, x - 1 : x + 1] if len(lengths) == 1 else picture[y - 1 : y + 1, x0:x1].swapaxes(0, 1)
    assert ((line < 0.45).all(axis=2).any(axis=1)).mean() > 0.5  # the dashes cover over half of the panel's extent
