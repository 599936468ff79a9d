"""Each family of benchmark rows (direction, dtype, shape) has a panel with its data, and no label covers another."""

import pytest

pytest.importorskip("matplotlib")
from flashpoint.plots import KINDS, benchmark_figure
from tests.support.pictures import check, laid_out, written
from tests.support.plot_rows import ROWS, SKIPPED, job, titles

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
    )  # in one panel, batches 1 and 4 would form one zigzag line
    assert len(panel_titles) == len(set(panel_titles)) == 8
    words = {text for text, _ in written(figure)}
    assert {"tiled", "sdpa_flash", "its_own"} <= words
    assert "flex" not in words
    assert {"O(N)", "O(N²)"} <= words if kind == "memory" else "O(N)" not in words
    assert any("p20 to p80 over 20%" in text for text in words) == (kind != "memory")
    if kind == "roofline":
        assert {"ridge 10", "ringed: above the measured roof", "128", "12k"} <= words
        over = "a point above the measured roof: its data stayed in caches, or others ran while the peaks were measured"
        assert any(over in " ".join(text.split()) for text in words)
        assert any("float32, as measured: 0.5 TFLOP/s, 50 GB/s" in " ".join(text.split()) for text in words)
