"""Numbers are written with three digits and units, and tables of every width show them in full."""

import io
import re

import pytest
from rich.console import Console

from flashpoint.commands.terminal.tables import benchmark_tables, count, number, size, verification_table
from flashpoint_contract.schemas.benchmark import BenchmarkRow
from flashpoint_contract.schemas.verify import VerifyReport
from tests.support.verify_answers import JUDGED, REPORT, ROW, ROW_FIGURES, SIZES, says


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (float("nan"), "nan"),
        (12345.6, "12,346"),
        (99.4, "99.4"),
        (0.5, "0.500"),
        (1e-5, "1.0e-05"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, ""), (512, "512 B"), (1536, "1.5 KiB"), (1023 << 20, "1,023 MiB"), (2 << 30, "2.0 GiB")]
)
def test_sizes_have_their_unit(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (12, "12"), (1234, "1.23 k"), (2.1e12, "2.1 T"), (3e17, "300 P")]
)
def test_counts_are_short(value, text):
    assert count(value) == text


def shown(what, width):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(what)
    return console.file.getvalue()


def words(text):
    return set(text.replace("\n", " ").split())


@pytest.mark.parametrize("width", [140, 80, 60])
def test_tables_keep_their_numbers_whole(width):
    judged = JUDGED | {
        "bound": 1.23e-6, "max_abs": 4.56e-7, "worst_index": [12, 31, 4095, 127], "name": "dattn_mask",
        "cosine": 0.9999999999, "worst_value": -1.23e-5, "worst_expected": 4.56e-5,
    }  # fmt: skip
    report = VerifyReport.model_validate(REPORT | {"tensors": [judged]})
    text = shown(verification_table(report, width), width)
    assert "…" not in text
    assert {"1.2e-06", "4.6e-07"} <= words(text)
    assert ("12,31,4095,127" in text) or width < 80
    assert "float64" in text or width < 140
    row = BenchmarkRow.model_validate(ROW | ROW_FIGURES | {"backend": "naive_explicit", "peak_bytes": 2**40})
    (table,) = benchmark_tables([row, row], width)
    text = shown(table, width)
    assert "…" not in text
    assert {"naive_explicit", "~1.25", "3.50"} <= words(text)
    assert "standard" in text or width < 140


def test_a_pipe_has_the_width_that_columns_names(run, scripted, monkeypatch):
    scripted.script.extend([says(REPORT)] * 2)
    monkeypatch.delenv("COLUMNS", raising=False)
    _, wide, _ = run("verify", *SIZES, "--url", scripted.url)
    monkeypatch.setenv("COLUMNS", "50")
    _, narrow, _ = run("verify", *SIZES, "--url", scripted.url)
    assert ("there" in wide, "there" in narrow) == (True, False)
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= 50
    assert re.search(r"1\.0e-06", narrow)
