"""A trial judges a function on one case: right, wrong or refused. A failure reports the position of the error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.process import Worker
from flashpoint_kernels.judging.signatures import signature_of
from flashpoint_kernels.judging.trial import Clock, StopError, Trial
from tests.judge.corpus import RIGHT
from tests.judge.seeds import verdicts_of

CASE = Case(batch=2, q_heads=2, kv_heads=2, q_len=9, kv_len=14, seed=3)


def right(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if q.shape[2] > 100:
        raise NotImplementedError("more than 100 queries")
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1 + s.shape[-1] - s.shape[-2]) > 0, -torch.inf)
    return s.softmax(-1) @ v  # type: ignore[no-any-return]


def wrong_at_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = right(q, k, v)
    return o + torch.nn.functional.one_hot(torch.tensor(5), o[0].numel()).view(o[0].shape) * 0.5


@pytest.fixture
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    worker = Worker(f"{__name__}:{request.param.__name__}", "cpu")
    signature = signature_of(worker.start())
    made = Trial(worker, signature, Clock(1e9), precision="ieee", timeout=60.0, nan_rows=False)
    yield made
    made.close()
    worker.close()


@pytest.mark.parametrize("trial", [right], indirect=True)
def test_right_answers_and_a_clear_refusal_are_no_failures(trial: Trial) -> None:
    for case in (CASE, replace(CASE, causal=True), replace(CASE, dtype="bfloat16")):
        outcome = trial.run(case)
        assert outcome.status in ("right", "imprecise")
        assert not outcome.failed
        assert outcome.answers.keys() == outcome.excess.keys() == {"o", "dq", "dk", "dv"}
        assert max(outcome.excess.values()) <= 1
    refused = trial.run(replace(CASE, q_len=101))
    assert (refused.status, refused.failed) == ("refused", False)
    assert "more than 100 queries" in refused.text


@pytest.mark.parametrize("trial", [wrong_at_one], indirect=True)
def test_one_wrong_number_is_located(trial: Trial) -> None:
    """The failure locates a number that is wrong in both sequences: head 0, row 0, column 5."""
    outcome = trial.run(CASE)
    assert (outcome.status, outcome.failed, outcome.wrong_outputs) == ("wrong", True, ("o",))
    failure = outcome.failure()
    assert (failure.output, failure.elements, failure.of) == ("o", 2, 2 * 2 * 9 * 16)
    assert failure.index is not None
    assert failure.index[1:] == (0, 0, 5)
    assert failure.error == pytest.approx(0.5, abs=1e-3)
    assert "head 0 of 2; row 0 of 9; column 5 of 16" in failure.where
    assert failure.case == CASE.to_dict()


def never_returns_for_many_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] > 10:
        threading.Event().wait()
    return right(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("trial", [never_returns_for_many_queries], indirect=True)
def test_a_call_that_the_end_of_the_judgement_cuts_is_no_hang(trial: Trial) -> None:
    trial.clock.seconds = trial.clock.spent + 2.0
    hung = trial.run(replace(CASE, q_len=11))  # no call has returned yet, so nothing shows that the function can
    assert (hung.status, hung.facts["ended"]) == ("ended", "hang")
    trial.clock.seconds = 1e9
    assert not trial.run(CASE).failed
    trial.clock.seconds = trial.clock.spent + 2.0
    with pytest.raises(StopError, match="there was no time left"):
        trial.run(replace(CASE, q_len=11))


@pytest.mark.parametrize("trial", [right], indirect=True)
def test_the_time_that_is_kept_for_later_work_is_not_left(trial: Trial) -> None:
    trial.clock.kept = 1e9
    with pytest.raises(StopError, match="there was no time left"):
        trial.run(CASE)
    trial.clock.kept = 0.0
    assert not trial.run(CASE).failed


@pytest.mark.parametrize("trial", [right], indirect=True)
def test_answers_of_prepared_cases_are_the_same(trial: Trial) -> None:
    expected: Any = trial.run(CASE)
    trial.prepare([CASE])
    prepared = trial.run(CASE)
    assert prepared.status == expected.status == "right"
    assert all(torch.equal(x, expected.answers[name]) for name, x in prepared.answers.items())
    assert prepared.excess == expected.excess
    trial.clock.seconds = 0.0
    with pytest.raises(StopError):
        trial.run(CASE)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(10, 50, 10))])
def test_no_right_kernel_is_blamed_on_random_cases(first: int) -> None:
    """Each right kernel passes the random cases of ten seeds; `python -m tests.judge.seeds` runs 500 seeds."""
    failures = [failure for _, _, failure in verdicts_of(list(RIGHT), range(first, first + 10))]
    assert [each for each in failures if each is not None] == []
