"""`Shape` computes missing sizes from the given ones; reports write NaN and infinities as JSON strings."""

import json
import math

import pytest
from pydantic import ValidationError

from flashpoint import Shape, VerifyReport
from flashpoint_contract.schemas.validation import field_problems
from tests.support.verify_answers import FIGURES


def test_a_shape_follows_from_what_is_given():
    shape = Shape.model_validate({"q_len": 300, "head_dim": 64, "q_heads": 8, "kv_heads": 2})
    assert shape.model_dump() == {
        "batch": 1, "q_heads": 8, "kv_heads": 2, "q_len": 300, "kv_len": 300, "head_dim": 64, "value_dim": 64,
    }  # fmt: skip
    assert Shape(q_len=0, kv_len=7, head_dim=1).kv_len == 7


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"q_len": -1}, "q_len"), ({"q_len": True}, "q_len"), ({"head_dim": 0}, "head_dim"), ({"heads": 4}, "heads"),
        ({"q_heads": 8, "kv_heads": 3}, ""), ({"kv_len": None}, "kv_len"), ({"batch": "2"}, "batch"),
    ],
)  # fmt: skip
def test_a_shape_that_cannot_be_is_refused(change, where):
    with pytest.raises(ValidationError) as info:
        Shape.model_validate({"q_len": 16, "head_dim": 8, **change})
    assert [problem.field for problem in field_problems(info.value)] == [where]


def test_numbers_that_json_lacks_travel_as_words():
    errors = {**FIGURES, "max_abs": math.inf, "cosine": math.nan, "worst_value": -math.inf}
    judged = {
        **errors, "name": "o", "bound": 1e-6, "rule": "r", "ok": False, "torch": FIGURES,
        "histogram": [{"exponent": None, "count": 3}, {"exponent": -7, "count": 1}],
    }  # fmt: skip
    about = {"ok": False, "backend": "given", "device": "cpu", "dtype": "float32", "seconds": 0.1}
    report = VerifyReport.model_validate({**about, "tensors": [judged]})
    text = json.dumps(report.model_dump(mode="json"), allow_nan=False)
    assert '"max_abs": "Infinity"' in text
    assert '"worst_value": "-Infinity"' in text
    actual = VerifyReport.model_validate_json(text).tensors[0]
    assert (actual.max_abs, math.isnan(actual.cosine), actual.rms) == (math.inf, True, 1e-7)
    with pytest.raises(ValidationError):
        VerifyReport.model_validate_json(text.replace("-Infinity", "minus infinity"))
