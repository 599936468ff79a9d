"""The schemas of /verify and /benchmark accept and refuse the right documents, and survive the wire."""

import json
import math

import pytest
from pydantic import ValidationError

from flashpoint import BenchmarkJob, BenchmarkRequest, BenchmarkRow, Shape, VerifyReport, VerifyRequest
from flashpoint_contract.schemas.benchmark import EVENT
from flashpoint_contract.schemas.validation import field_problems
from tests.support.proof_answers import FIGURES, ROW


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


DRAWN = {"shape": {"q_len": 16, "head_dim": 8}}
GRID = {"shapes": [DRAWN["shape"]]}
ONE_OF = "must be 'dq', 'dk', 'dv', 'dattn_mask' or 'dsinks'"


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (VerifyRequest, {"window": 5}, [("window", "must be a list")]),
        (VerifyRequest, {"window": [1]}, [("window", "item 2 is missing")]),
        (VerifyRequest, {"window": [1, 2, 3]}, [("window", "takes 2 at most, not 3")]),
        (VerifyRequest, {"window": [-2, 0]}, [("window", "must be greater than or equal to -1")]),
        (VerifyRequest, {"grads": ["dz"]}, [("grads", ONE_OF)]),
        (VerifyRequest, {"grads": []}, [("grads", "takes 1 at least, not 0")]),
        (VerifyRequest, {"grads": ["dq", "dq"]}, [("grads", "names a gradient twice")]),
        (VerifyRequest, {"causal": "yes"}, [("causal", "must be true or false")]),
        (VerifyRequest, {"seed": "1"}, [("seed", "must be an integer")]),
        (VerifyRequest, {"seed": 1.5}, [("seed", "must be an integer")]),
        (VerifyRequest, {"scale": "1"}, [("scale", "must be a number")]),
        (VerifyRequest, {"scale": math.nan}, [("scale", "must be a finite number")]),
        (VerifyRequest, {"softcap": 1e-40}, [("softcap", "must be 0 (off) or within float32's normal range")]),
        (VerifyRequest, {"shape": {"q_len": 64}}, [("shape.head_dim", "is missing")]),
        (VerifyRequest, {"shape": 64}, [("shape", "must be an object")]),
        (VerifyRequest, {"casual": True}, [("casual", "unknown option or tensor; did you mean causal?")]),
        (
            VerifyRequest,
            {"caches": ["c"]},
            [
                (
                    "caches",
                    "is only for POST /attention over caches, in JSON or safetensors, and for the SDK's attention",
                )
            ],
        ),
        (BenchmarkRequest, {"dtypes": ["float64"]}, [("dtypes", "must be 'float16', 'bfloat16' or 'float32'")]),
        (BenchmarkRequest, {"backends": [3]}, [("backends", "must be a string")]),
        (BenchmarkRequest, {"shapes": []}, [("", "name a preset, or shapes to time")]),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_refused_is_said_in_words_of_the_contract(model, change, message, as_json):
    document = {**(DRAWN if model is VerifyRequest else GRID), **change}
    with pytest.raises(ValidationError) as info:
        model.model_validate_json(json.dumps(document)) if as_json else model.model_validate(document)
    assert field_problems(info.value) == message


def test_a_verification_takes_the_options_of_every_call():
    body = {"shape": {"q_len": 64, "head_dim": 32}, "causal": True, "window": [8, 0], "extras": ["sinks"], "seed": 3}
    request = VerifyRequest.model_validate_json(json.dumps(body))
    assert (request.causal, request.window, request.extras, request.direction) == (True, (8, 0), ("sinks",), "both")
    with pytest.raises(ValidationError, match="casual"):
        VerifyRequest.model_validate({**body, "casual": True})


@pytest.mark.parametrize("body", [{"preset": "papers"}, {"shapes": [{"q_len": 64, "head_dim": 32}], "causal": [True]}])
def test_a_grid_survives_the_wire(body):
    request = BenchmarkRequest.model_validate(body)
    assert BenchmarkRequest.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    "body",
    [
        {}, {"shapes": []}, {"preset": "seed"}, {"preset": "papers", "dtypes": ["float16"]},
        {"shapes": [{"q_len": 1}]}, {"preset": "seeds", "max_seconds": 0}, {"preset": "h100", "max_seconds": math.inf},
        {"preset": "papers", "dtypes": []}, {"shapes": [{"q_len": 64, "head_dim": 32}], "dtypes": ["float64"]},
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_refused(body):
    with pytest.raises(ValidationError):
        BenchmarkRequest.model_validate(body)


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


def test_a_job_is_the_sum_of_its_events():
    job = BenchmarkJob.model_validate(
        {"id": "j", "created": "2026-01-01T00:00:00Z", "request": {"preset": "papers"}, "total": 2}
    )
    events = [
        {"id": 1, "kind": "state", "state": "running", "at": "2026-01-01T00:00:01Z"},
        {"id": 2, "kind": "progress", "done": 0, "total": 2},
        {"id": 3, "kind": "device", "device": "d", "environment": {"torch": "2"}},
        {"id": 4, "kind": "row", "done": 1, "total": 2, "row": ROW | {"ms": 1.5}},
        {"id": 5, "kind": "state", "state": "failed", "at": "2026-01-01T00:00:09Z", "error": "no memory"},
    ]  # fmt: skip
    for event in events:
        job = job.after(EVENT.validate_json(json.dumps(event)))
    assert (job.state, job.device, job.environment, job.errors) == ("failed", "d", {"torch": "2"}, ("no memory",))
    assert job.rows == (BenchmarkRow(**ROW, ms=1.5),)
    assert (job.started.second, job.ended.second, job.done, job.total) == (1, 9, 1, 2)
    assert BenchmarkJob.model_validate_json(job.model_dump_json()) == job


def test_an_event_has_a_kind_and_a_time_with_its_zone():
    for event in (
        {"id": 1, "kind": "other"},
        {"id": 1, "kind": "state", "state": "running", "at": "2026-01-01T00:00:00"},
        {"id": 0, "kind": "progress", "done": 0, "total": 0},
    ):
        with pytest.raises(ValidationError):
            EVENT.validate_python(event)
