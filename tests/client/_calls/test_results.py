"""The results of `verify` and `benchmark` display as HTML tables and pictures in a notebook."""

import sys

import pytest

import flashpoint
from tests.support.verify_answers import JOB, REPORT, ROW

MEASURED = ROW | {"ms": 1.25, "ms_p20": 1.0, "ms_p80": 2.0, "tflops": 0.5}


def test_a_report_is_a_table_and_a_picture():
    report = flashpoint.VerifyReport.model_validate(REPORT | {"device": "<cpu>"})
    html = report._repr_html_()
    assert html.startswith("<p>PASS · tiled · float32 · &lt;cpu&gt;</p><table>")
    assert "<td>o</td><td>1e-07</td><td>1e-06</td>" in html
    picture = report.plot()
    assert picture._repr_svg_() == picture.decode()
    assert b"<svg" in picture


def test_a_benchmark_is_a_table_and_a_picture():
    job = flashpoint.BenchmarkJob.model_validate(JOB | {"rows": [MEASURED, ROW | {"skipped": "too large"}]})
    html = job._repr_html_()
    assert "<td>tiled</td><td>1.25</td><td>0.5</td>" in html
    assert "<td>too large</td>" in html
    assert b"<svg" in job.plot("time")
    with pytest.raises(ValueError, match="nothing to plot"):
        job.plot("memory")


def test_a_picture_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("flashpoint.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"a picture needs matplotlib: pip install '.\[plot\]'"):
        flashpoint.VerifyReport.model_validate(REPORT).plot()
