"""Compare a kernel's answers with the oracle's, element by element, within bounds made from the inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels import Options, Problem, run
from tests.support import oracle
from tests.support.sweep.bounds import bounds
from tests.support.sweep.cases import Case, tensors_of


def check_all(cases: Iterable[Case], backend: str) -> None:
    """Check cases. The error of a wrong one has the case as a note."""
    for case in cases:
        try:
            check(case, backend)
        except Exception as error:
            error.add_note(str(case))
            raise


def check(case: Case, backend: str) -> None:
    """Assert that answers are right, that inputs stay as they are, and that a second call has the same bits."""
    tensors, options = tensors_of(case)
    before = {name: t.clone() for name, t in tensors.items()}
    finite = tensors
    if "not_finite" in case.features:
        finite, _ = tensors_of(replace(case, features=case.features - {"not_finite"}))
    truth, allowed = oracle.answer(tensors, options), bounds(finite, options)
    inputs = {name: t for name, t in tensors.items() if name not in ("do", "dlse")}
    asked = {name: value for name, value in options.items() if name != "grads"}
    answers = solve(inputs, Options(**asked, return_lse=True), "forward", backend)
    if "do" in tensors:
        saved = {name: answers[name] for name in ("o", "lse")} if "given" in case.features else {}
        answers |= solve(tensors | saved, Options(**options), "backward", backend)
    for name, t in answers.items():
        if "not_finite" in case.features:  # what it reaches may be NaN or infinite; nothing else may change
            reached = truth[name].isnan() | (truth[name].isinf() & (name != "lse"))
            t, truth[name] = t.double().masked_fill(reached, 0), truth[name].masked_fill(reached, 0)
        compare(name, t, truth[name], allowed[name])
    for name, t in tensors.items():
        assert same_bits(t, before[name]), f"{name}, an input, was changed"


def solve(tensors: dict[str, Tensor], options: Options, direction: Any, backend: str) -> dict[str, Tensor]:
    """Run one problem twice into outputs that were NaN before, and return them."""
    problem = Problem.create(tensors, options, direction)
    first: dict[str, Tensor] = {}
    for _ in range(2):
        for t in problem.outputs.values():
            t.fill_(torch.nan)
        run([problem], backend)
        for name, t in problem.outputs.items():
            again = first.setdefault(name, t.clone())
            assert same_bits(again, t), f"{name} has other bits in the second call"
        if backend == "triton":  # its interpreter takes long; tests of routes repeat calls
            break
    return dict(problem.outputs)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))


def compare(name: str, actual: Tensor, truth: Tensor, allowed: Tensor) -> None:
    """Assert that no element's error is beyond its bound."""
    assert actual.shape == truth.shape, f"{name} has shape {tuple(actual.shape)}, not {tuple(truth.shape)}"
    error = (actual.double() - truth).abs()
    right = (error <= allowed) | (actual.double() == truth)
    if right.all():
        return
    wrong = (~right).nonzero()
    place = tuple(wrong[0].tolist())
    worst = (error / allowed).nan_to_num(torch.inf).max().item()
    raise AssertionError(
        f"{len(wrong)} of {right.numel()} elements of {name} are wrong: {name}{list(place)} is {actual[place].item()}, "
        f"not {truth[place].item()} ± {allowed[place].item():.2g}; the largest error is {worst:.1f} times its bound"
    )
