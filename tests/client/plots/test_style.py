"""Each backend has a distinct style, the caller's kernel has the boldest line, and equal pictures have equal bytes."""

import itertools
import threading
from functools import partial

import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashpoint.plots import benchmark_figure, plot_benchmark, style
from tests.support.covering import cover
from tests.support.pictures import check, laid_out, painted, pixels, written
from tests.support.plot_rows import job, row


def test_every_backend_beside_every_other_in_one_panel():
    many = ["naive", "naive_explicit", "triton", "cpu", "tiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"]
    rows = [row("naive", n) | {"backend": b, "ms": n * (i + 1) / 1e3} for i, b in enumerate(many) for n in (512, 1024)]
    for kind, some in (("time", rows), ("time", rows[::2]), ("speedup", rows), ("roofline", rows)):
        check(laid_out(lambda kind=kind, some=some: benchmark_figure(job(some), kind)))


@cover(theme=["light", "dark"], kind=["time", "tflops", "roofline"])
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
        del area["naive"]  # the lines of the roofs have the same colour, and would count
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
