"""Pictures draw each row at its place, without overlaps or cuts, with the right pixels."""

import itertools
import threading
from functools import partial

import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashpoint import BenchmarkJob, VerifyReport
from flashpoint.plots import KINDS, benchmark_figure, plot_benchmark, plot_verification, style
from flashpoint.plots.errors import histograms
from tests.support.pictures import check, laid_out, painted, pixels, written
from tests.support.proof_answers import FIGURES, ROW

PEAKS = {
    "float32": {"tflops": 0.5, "gb_per_s": 50.0, "sheet_tflops": 0.75, "sheet_gb_per_s": 60.0, "sheet": "its maker"},
    "float16": {"tflops": 0.9, "gb_per_s": 50.0, "sheet_tflops": None, "sheet_gb_per_s": None, "sheet": None},
}
FASTER = {"naive": 1, "tiled": 2, "sdpa_flash": 4, "its_own": 3}


def row(backend, n, direction="forward", **more):
    ms = n * n / 1e4 / FASTER[backend]
    return ROW | {
        "backend": backend, "direction": direction, "q_len": n, "kv_len": n, "ms": ms, "ms_p20": ms * 0.97,
        "ms_p80": ms * 1.1, "repeats": 9, "tflops": 0.05 * FASTER[backend], "tflops_standard": 0.05,
        "arithmetic_intensity": 8.0 + n / 1e4 if backend == "naive" else 1.0 * n,
        "roofline_percent": 20.0, "peak_bytes": n * (n if backend == "naive" else 64),
        "speedup_over_naive": float(FASTER[backend]), **more,
    }  # fmt: skip


def job(rows, **environment):
    about = {"id": "j", "created": "2026-01-01T00:00:00Z", "request": {"preset": "papers"}}
    device = "Chip & Co, whose name is as long as the names of some processors are, 2 cores at 3.4 GHz"
    return BenchmarkJob.model_validate(
        {**about, "device": device, "rows": rows, "environment": {"peaks": PEAKS, **environment}}
    )


# Three families with one length, four with several: lines and bars in one picture.
ROWS = [
    *(row(b, n, d) for b, n, d in itertools.product(FASTER, (128, 256, 384, 12 * 1024), ("forward", "backward"))),
    *(row(b, 512, d, head_dim=32, value_dim=32) for b, d in itertools.product(FASTER, ("forward", "backward"))),
    row("naive", 2048, causal=True, dtype="float16"),
    row("tiled", 2048, causal=True, dtype="float16", ms_p80=900.0, roofline_percent=407.0, tflops=3.0),
    *(row(b, n, q_len=1) for b in ("naive", "tiled") for n in (1024, 4096)),
    *(row("tiled", n, head_dim=128, batch=b) for n in (1024, 2048) for b in (1, 4)),
]  # fmt: skip
SKIPPED = ROW | {"backend": "flex", "head_dim": 256, "skipped": "no compiler"}


def titles(figure):
    return [ax.get_title(loc="left") for ax in figure.axes]


DRAWN = [pytest.param(kind, marks=pytest.mark.slow if kind in ("tflops", "memory") else ()) for kind in KINDS]


@pytest.mark.parametrize("kind", DRAWN)
def test_each_family_has_a_panel_with_its_data_and_no_label_covers_another(kind):
    figure = laid_out(lambda: benchmark_figure(job([*ROWS, SKIPPED]), kind))
    check(figure)
    panel_titles = titles(figure)
    assert {"forward · float32\nH 2/1 D 64".replace("H", "B 1 H"), "backward · float32\nB 1 H 2/1 D 64"} <= set(
        panel_titles
    )
    assert {"forward · float32\nB 1 H 2/1 N 512 D 32", "forward · float32\nB 1 H 2/1 N 1/… D 64"} <= set(panel_titles)
    assert "forward, causal · float16\nB 1 H 2/1 N 2048 D 64" in panel_titles
    assert {f"forward · float32\nB {b} H 2/1 D 128/64" for b in (1, 4)} <= set(
        panel_titles
    )  # not one zigzag line for both
    assert len(panel_titles) == len(set(panel_titles)) == 8
    words = {text for text, _ in written(figure)}
    assert {"tiled", "sdpa_flash", "its_own"} <= words
    assert "flex" not in words
    assert {"O(N)", "O(N²)"} <= words if kind == "memory" else "O(N)" not in words
    assert any("p20 to p80 over 20%" in text for text in words) == (kind != "memory")
    if kind == "roofline":
        assert {"ridge 10", "ringed: above the measured roof", "128", "12k"} <= words
        assert any("float32, as measured: 0.5 TFLOP/s, 50 GB/s" in " ".join(text.split()) for text in words)


@pytest.mark.parametrize("kind", ["time", "speedup", pytest.param("tflops", marks=pytest.mark.slow), "roofline"])
def test_one_row_is_a_picture(kind):
    figure = laid_out(lambda: benchmark_figure(job([row("tiled", 512)]), kind), "dark")
    check(figure)
    assert len(figure.axes) == 1
    if kind != "roofline":
        assert len(figure.axes[0].patches) == 1
    assert figure.get_facecolor() != (1, 1, 1, 1)


def test_every_backend_beside_every_other_in_one_panel():
    many = ["naive", "naive_explicit", "triton", "torch", "tiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"]
    rows = [row("naive", n) | {"backend": b, "ms": n * (i + 1) / 1e3} for i, b in enumerate(many) for n in (512, 1024)]
    for kind, some in (("time", rows), ("time", rows[::2]), ("speedup", rows), ("roofline", rows)):
        check(laid_out(lambda kind=kind, some=some: benchmark_figure(job(some), kind)))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["time", "tflops", "roofline"])
def test_the_callers_kernel_is_the_boldest_line_under_its_functions_name(kind, theme):
    others = ["naive", "torch", "sdpa_flash", "flex"]
    each = {name: 1 + i for i, name in enumerate([*others, "kernel"])}
    rows = [
        row("naive", n, ms=n / i, ms_p20=None, ms_p80=None, tflops=0.06 * i, tflops_standard=0.06 * i)
        | {"backend": name, "arithmetic_intensity": n / 4.0}
        for name, i in each.items()
        for n in (128, 16384)
    ]
    figure = laid_out(lambda: benchmark_figure(job(rows, kernel="mine.kernels:my_attention"), kind), theme)
    check(figure)
    assert "my_attention" in {text for text, _ in written(figure)}
    with style.themed(theme):
        area = {name: painted(figure, figure.axes[0], style.look(name).colour) for name in each}
    assert min(area.values()) > 0
    if kind == "roofline":
        del area["naive"]  # the roofs have its colour
    assert area.pop("kernel") > 1.5 * max(area.values()), area


def test_a_kernel_called_like_a_backend_has_its_module_beside_it():
    rows = [row("naive", 64), row("naive", 64) | {"backend": "kernel"}]
    bars = laid_out(lambda: benchmark_figure(job(rows, kernel="mine:torch"), "time"))
    assert {"naive", "mine:torch"} <= {text for text, _ in written(bars)}


def test_backends_can_be_told_apart_in_grey_print():
    """No two legend keys and no two bars of backends look nearly equal in grey."""

    def printed(artists):
        with style.themed("light"):
            figure = Figure(figsize=(0.9, 0.4))
            FigureCanvasAgg(figure)
            artists(figure)
            return pixels(figure) @ (0.299, 0.587, 0.114)

    def key(figure, name):
        figure.legend([style.key(name)], [""], handlelength=5, loc="center")

    def bar(figure, name):
        figure.add_artist(Rectangle(xy=(0, 0), width=1, height=1, **style.bar(name)))

    for draw in (key, bar):
        drawn = {name: printed(partial(draw, name=name)) for name in style.LOOKS}
        for (a, left), (b, right) in itertools.combinations(drawn.items(), 2):
            assert (abs(left - right) > 0.1).sum() > 30, (draw.__name__, a, b)


def test_lengths_close_to_each_other_are_not_overprinted():
    rows = [row(b, n) for b in ("naive", "tiled") for n in (1000, 1010, 1100, 4096, 4100, 16384, 131072)]
    for kind in ("time", "speedup", "roofline"):
        check(laid_out(lambda kind=kind: benchmark_figure(job(rows), kind)))


def test_a_picture_is_the_same_each_time_in_any_thread_and_another_in_the_dark():
    few, drawn = job([row("naive", 128), row("naive", 256)]), []
    threads = [threading.Thread(target=lambda: drawn.append(plot_benchmark(few, "time"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn[0] == drawn[1]
    assert b"#14181f" not in drawn[0]
    assert b"#14181f" in plot_benchmark(few, "time", theme="dark")
    assert plot_benchmark(few, "time", "png").startswith(b"\x89PNG\r\n")


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
    assert ((line < 0.45).all(axis=2).any(axis=1)).mean() > 0.5  # of the panel, because it is dashed


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
