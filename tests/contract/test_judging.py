"""The judge's report is written as text, and as JSON that the published schema accepts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashpoint_contract.judging import REQUIREMENTS, Cause, Failure, NotJudged, Property, Report, schema

jsonschema = pytest.importorskip("jsonschema")

PUBLISHED = Path(__file__).parents[2] / "docs/reference/judge-report.schema.json"
RIGHT = Report(
    "m:f", "plain", "bhsd", "cpu", "right", True, ("float32",), ("o", "lse"), True, 9, 12, 0, 1.5, 1.0, 0.5,
    {"torch": "2"},
)  # fmt: skip
WORST = Failure("accuracy", "B 1", {"q_len": 3}, "off", "o", float("inf"), 1e-6, 2e-6, float("nan"), (0, 1), 3.0, 1.0)
WRONG = replace(
    RIGHT, verdict="wrong", ok=False, failures=(WORST,), smallest=WORST, failed=2, command="flashpoint verify",
    causes=(Cause("scale-missing", "the scale is missing", "multiply once", True, 2),),
    refused=(NotJudged("float16", "TypeError", 3),),
)  # fmt: skip


def test_the_published_schema_is_that_of_the_class():
    """The published file equals `schema()`; `python docs/make_tables.py` writes it."""
    assert json.loads(PUBLISHED.read_text()) == schema()
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("report", [RIGHT, WRONG], ids=["right", "wrong"])
def test_a_report_is_json_of_the_schema_with_words_for_numbers_that_json_lacks(report):
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    jsonschema.validate(document, schema())
    assert document["ok"] == report.ok
    if report.smallest:
        assert (document["smallest"]["error"], document["smallest"]["excess"]) == ("Infinity", "NaN")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"verdict": "perhaps"}, schema())


def test_the_text_ends_with_the_verdict_and_what_is_required_and_lacking():
    assert RIGHT.lines()[-1] == "PASS: right: every error is within its bound"
    lines = WRONG.lines()
    assert "cause: the scale is missing [scale-missing, confirmed, 2 of 2 failing cases]" in lines
    assert "  hint: multiply once" in lines
    assert "unsupported: float16 (3 cases): TypeError" in lines
    assert "repeat it: flashpoint verify" in lines
    assert lines[-1] == "FAIL: wrong: 2 of 9 cases fail"
    lacking = Property("deterministic", "fails", "bits differ", required=True)
    assert replace(RIGHT, ok=False, properties=(lacking,)).lines()[-1] == (
        "FAIL: every error is within its bound, but bits differ (--require deterministic)"
    )


def test_a_line_names_require_only_for_a_property_that_it_takes():
    properties = tuple(Property(name, "fails", "lacking") for name in ("masked-nan", "float64", "dropout"))
    advised = [line for line in replace(RIGHT, properties=properties).lines() if line.startswith("reported")]
    assert advised == [
        "reported, no failure: lacking (--require masked-nan fails it)", *["reported, no failure: lacking"] * 2,
    ]  # fmt: skip
    assert "masked-nan" in REQUIREMENTS
