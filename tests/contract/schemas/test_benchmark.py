"""A benchmark request is unchanged by JSON; a job's events, applied in order, give the job's state."""

import json
import math

import pytest
from pydantic import ValidationError

from flashpoint import BenchmarkJob, BenchmarkRequest, BenchmarkRow
from flashpoint_contract.schemas.benchmark import EVENT
from tests.support.verify_answers import ROW


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
