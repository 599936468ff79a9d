"""The pictures: what they show, as the text of their SVG."""

import itertools
import re
import threading

import pytest

from flashpoint import BenchmarkJob, VerifyReport
from flashpoint.plots import KINDS, plot_benchmark, plot_verification
from tests.support.proof_answers import FIGURES, ROW

PEAKS = {
    "float32": {"tflops": 0.5, "gb_per_s": 50.0, "sheet_tflops": 0.75, "sheet_gb_per_s": 60.0, "sheet": "its maker"}
}
FASTER = {"naive": 1, "tiled": 2, "sdpa_flash": 4, "its_own": 3}


def row(backend, n, direction="forward", **more):
    ms = n * n / 1e4 / FASTER[backend]
    return ROW | {
        "backend": backend, "direction": direction, "q_len": n, "kv_len": n, "ms": ms, "ms_p20": ms * 0.9,
        "ms_p80": ms * 1.2, "repeats": 9, "tflops": 0.1, "tflops_standard": 0.05, "arithmetic_intensity": 1.0 * n,
        "roofline_percent": 20.0, "peak_bytes": n * (n if backend == "naive" else 64),
        "speedup_over_naive": float(FASTER[backend]), **more,
    }  # fmt: skip


def job(rows):
    about = {"id": "j", "created": "2026-01-01T00:00:00Z", "request": {"preset": "seeds"}, "device": "Chip & Co"}
    return BenchmarkJob.model_validate({**about, "rows": rows, "environment": {"peaks": PEAKS}})


ROWS = [row(b, n, d) for b, n, d in itertools.product(FASTER, (128, 256, 12 * 1024), ("forward", "backward"))]
SKIPPED = ROW | {"backend": "flex", "skipped": "no compiler"}
SINGLE = row("naive", 512, dtype="float16")


def words(svg):
    return [re.sub("<[^>]*>", "", text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg.decode(), re.DOTALL)]


DRAWN = [pytest.param(kind, marks=pytest.mark.slow if kind in ("tflops", "speedup") else ()) for kind in KINDS]


@pytest.mark.parametrize("kind", DRAWN)
def test_a_picture_says_what_it_shows(kind):
    found = words(plot_benchmark(job([*ROWS, SKIPPED]), kind))
    assert any(text.startswith("Chip &amp; Co") for text in found)
    assert {"tiled", "sdpa_flash", "its_own"} <= set(found)
    assert "flex" not in found
    if kind == "roofline":
        assert {"float32", "ridge 10", "measured: 0.5 TFLOP/s, 50 GB/s", "data sheet: 0.75 TFLOP/s, 60 GB/s"} <= {
            *found
        }
    else:
        assert {"forward · float32 · H 2/1 · D 64", "backward · float32 · H 2/1 · D 64"} <= set(found)
        assert {"128", "256", "12k"} <= set(found)
    assert ("naive" in found) == (kind != "speedup")  # which is 1 there
    assert {"O(N)", "O(N²)"} <= set(found) if kind == "memory" else "O(N)" not in found


def test_a_picture_is_the_same_each_time_in_any_thread():
    few, drawn = job([row("naive", 128), row("naive", 256)]), []
    threads = [threading.Thread(target=lambda: drawn.append(plot_benchmark(few, "time"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn[0] == drawn[1]
    assert plot_benchmark(few, "time", "png").startswith(b"\x89PNG\r\n")


def test_cases_of_one_length_are_shown_where_there_are_no_others():
    assert not any(
        "float16" in text for text in words(plot_benchmark(job([row("naive", 128), row("naive", 256), SINGLE]), "time"))
    )
    assert any("float16" in text for text in words(plot_benchmark(job([SINGLE]), "time")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_benchmark_without_figures_has_no_picture(kind):
    for rows in ([], [SKIPPED]):
        with pytest.raises(ValueError, match="nothing to plot"):
            plot_benchmark(job(rows), kind)


def test_a_speedup_needs_more_than_naive_and_a_roofline_its_peaks():
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_benchmark(job([SINGLE]), "speedup")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_benchmark(job([SINGLE]), "roofline")


def test_a_verification_shows_the_errors_of_each_tensor_and_its_bound():
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
    exact = good | {"name": "lse", "max_abs": 0.0, "bound": 0.0, "histogram": histogram[:1]}
    empty = exact | {"name": "dv", "histogram": []}
    about = {"backend": "tiled", "device": "cpu", "dtype": "float32", "seconds": 1, "ok": False}
    report = VerifyReport.model_validate({**about, "tensors": [good, bad, exact, empty]})
    found = words(plot_verification(report))
    assert "Errors: NOT all within their bounds" in found
    assert "o: within its bound · largest 1.0e-07" in found
    assert "dq: NOT within its bound · largest inf" in found
    assert [text.strip() for text in found].count("bound 2.0e-06") == 2
    assert found.count("∞") == 1
