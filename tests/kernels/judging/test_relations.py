"""Wrong kernels fail the relation that shows their mistake; a right kernel passes every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import flashpoint_kernels
from flashpoint_contract.judging import Property
from flashpoint_kernels.judging import dropping, relations
from flashpoint_kernels.judging.cases import TYPES, Case
from flashpoint_kernels.judging.process import Worker, target_of
from flashpoint_kernels.judging.signatures import signature_of
from flashpoint_kernels.judging.trial import Clock, Outcome, Trial
from tests.judge.corpus import RIGHT, WRONG

CASE = Case(batch=2, q_heads=4, kv_heads=2, q_len=33, kv_len=77, head_dim=64, value_dim=64, seed=5)


@contextmanager
def trial_of(function: Any) -> Iterator[Trial]:
    worker = Worker(target_of(function), "cpu")
    made = Trial(worker, signature_of(worker.start()), Clock(1e9), precision="ieee", timeout=60.0, nan_rows=False)
    try:
        yield made
    finally:
        made.close()
        worker.close()


def failures(found: Iterator[Outcome | Property]) -> set[str]:
    return {each.relation for each in found if isinstance(each, Outcome) and each.failed}


MEMORY = {
    "expanded": "inputs with a stride of 0", "values_are_keys": "v that is k",
    "one_storage_of_inputs": "inputs in one storage",
    "do_expanded_over_heads": "a gradient of o in another memory form",
}  # fmt: skip
CONTEXTS = {
    "two_layers": "two forwards before their backwards", "inputs_on_ctx": "inputs that change before the backward",
    "wrong_in_inference_mode": "inference mode", "wrong_in_another_thread": "another thread",
    "wrong_in_two_threads": "two threads at once", "wrong_under_autocast": "autocast",
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY)
def test_a_mistake_with_shared_memory_fails_its_relation(name: str) -> None:
    with trial_of(WRONG[name].function) as trial:
        assert MEMORY[name] in failures(relations.shared_memory(trial, CASE))


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_mistake_in_a_context_fails_its_relation(name: str) -> None:
    case = replace(CASE, dtype="bfloat16") if name == "wrong_under_autocast" else CASE
    with trial_of(WRONG[name].function) as trial:
        assert CONTEXTS[name] in failures(relations.contexts(trial, case))


def test_other_derivatives_and_compilation_show_mistakes() -> None:
    with trial_of(WRONG["second_derivative"].function) as trial:
        assert "a second derivative" in failures(relations.other_derivatives(trial, CASE))
    with trial_of(WRONG["float64_in_float32"].function) as trial:
        found = list(relations.other_derivatives(trial, CASE))
        assert [each.name for each in found if isinstance(each, Property)] == ["float64"]
        assert [each.status for each in found if isinstance(each, Outcome)] == ["imprecise"]
    with trial_of(WRONG["wrong_if_compiled"].function) as trial:
        assert failures(relations.compiled(trial, CASE)) == {"torch.compile"}


@pytest.mark.parametrize("name", ["online", "every_option", "formula_in_the_type", "varlen", "one_sequence", "packed"])
def test_a_right_kernel_keeps_its_relations(name: str) -> None:
    with trial_of(RIGHT[name]) as trial:
        for dtype in ("float32", "bfloat16"):
            case = trial.fitted(replace(CASE, dtype=dtype))
            assert case is not None
            found = [*relations.shared_memory(trial, case), *relations.contexts(trial, case)]
            found += [o for o in relations.other_derivatives(trial, case) if isinstance(o, Outcome)]
            assert failures(iter(found)) == set(), [o.failure().text for o in found if o.failed]


@pytest.mark.parametrize("name", ["dropout_unscaled", "dropout_of_the_backward", "dropout_of_the_complement"])
def test_dropout_is_judged_by_the_weights_that_it_keeps(name: str) -> None:
    with trial_of(WRONG[name].function) as trial:
        assert failures(dropping.dropout(trial, TYPES, 3)) == {"dropout"}
    with trial_of(RIGHT["dropout"]) as trial:
        found = list(dropping.dropout(trial, TYPES, 3))
        assert [each.status for each in found if isinstance(each, Outcome)] == ["right"] * 3


@pytest.mark.slow
def test_a_right_kernel_keeps_every_relation() -> None:
    """A right kernel passes all cases and relations in float32, also the relations that need several shapes."""
    report = flashpoint_kernels.judge(RIGHT["half_weights"], quick=True, dtype="float32", seed=4)
    assert report.verdict in ("right", "imprecise"), report.lines()
    assert {failure.relation for failure in report.imprecise} <= {"float64"}
    assert report.race is not None
    assert report.calls > report.cases > 100
