"""Compare a kernel's answers with the oracle's, element by element, within bounds made from the inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.problems.problem import launch_key
from tests.support import oracle
from tests.support.kernels.solving import restrided
from tests.support.kernels.tangents import DIRECTIONS, check_tangents
from tests.support.sweep.bounds import bounds
from tests.support.sweep.cases import OF_FORWARD, Case, tensors_of

TOGETHER = 6  # problems of one call, of those backends that cut a call into parts
OTHER_MEMORY = {"q": "apart", "k": "slice", "v": "odd", "do": "turned"}


def check_all(cases: Iterable[Case], backend: str) -> None:
    """Check cases, each alone, and beside unlike neighbours in one call. An error has its cases as a note."""
    solved: list[Problem] = []
    checked: list[Case] = []
    for case in cases:
        checked.append(case)
        try:
            solved += check(case, backend)
            if backend in ("cpu", "tiled") and len(checked) == TOGETHER:
                for problems in alike(solved, backend):
                    check_together(problems, backend)
        except Exception as error:
            error.add_note("\n".join(map(str, checked)))
            raise
        if len(checked) == TOGETHER:
            solved, checked = [], []


def alike(problems: Iterable[Problem], backend: str) -> Iterable[list[Problem]]:
    """Return the problems in lists, each of which may run in one call."""
    lists: dict[object, list[Problem]] = {}
    for problem in problems:
        lists.setdefault(launch_key(problem.spec, backend), []).append(problem)
    return lists.values()


def check_together(problems: list[Problem], backend: str) -> None:
    """Assert that in one call of solved problems, each has the bits that it had alone."""
    alone = [{name: t.clone() for name, t in problem.outputs.items()} for problem in problems]
    for problem in problems:
        for t in problem.outputs.values():
            t.fill_(torch.nan)
    run(problems, backend)
    for number, (problem, answers) in enumerate(zip(problems, alone, strict=True)):
        for name, t in problem.outputs.items():
            assert same_bits(t, answers[name]), f"{name} of problem {number} of {len(problems)} has other bits alone"


def check(case: Case, backend: str) -> list[Problem]:
    """Assert that answers are right, that inputs stay as they are, and that a second call has the same bits.

    Return the solved problems. The second call of every second case of `cpu` has its tensors in another memory form.
    """
    tensors, options = tensors_of(case)
    before = {name: t.clone() for name, t in tensors.items()}
    truth = oracle.answer(tensors, options)
    allowed = _bounds(case, tensors, options, truth)
    inputs = {name: t for name, t in tensors.items() if name not in ("do", "dlse")}
    asked = {name: value for name, value in options.items() if name != "grads"}
    in_other_memory = backend == "cpu" and case.seed % 2 == 1
    # Triton's interpreter takes long; tests of routes repeat calls
    calls = 1 if backend == "triton" or in_other_memory else 2
    problems = [solve(inputs, Options(**asked, return_lse=True), "forward", backend, calls)]
    answers = dict(problems[0].outputs)
    if "do" in tensors:
        saved = {name: answers[name] for name in ("o", "lse")} if "given" in case.features else {}
        problems.append(solve(tensors | saved, Options(**options), "backward", backend, calls))
        answers |= problems[1].outputs
    for name, t in answers.items():
        if "not_finite" in case.features:  # what it reaches may be NaN or infinite; nothing else may change
            reached = truth[name].isnan() | (truth[name].isinf() & (name != "lse"))
            t, truth[name] = t.double().masked_fill(reached, 0), truth[name].masked_fill(reached, 0)
        if "huge" in case.features and name != "o":  # lse has no room for the sum, and gradients begin with lse
            assert not t.isnan().any(), f"{name} has NaN"
            continue
        compare(name, t, truth[name], allowed[name])
    for name, t in tensors.items():
        assert same_bits(t, before[name]), f"{name}, an input, was changed"
    if backend == "cpu" and not case.features & {"not_finite", "huge", *OF_FORWARD}:
        check_tangents(tensors, options, DIRECTIONS[case.seed % len(DIRECTIONS)])
    if in_other_memory:
        check_other_memory(problems, case)
    return problems


def _bounds(
    case: Case, tensors: dict[str, Tensor], options: dict[str, Any], truth: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the bounds of a case; for one with extreme numbers, those of the same case with ordinary numbers."""
    if not case.features & {"not_finite", "huge"}:
        return bounds(tensors, options, truth)
    features = case.features - {"not_finite", "huge"} | ({"tame"} if "huge" in case.features else set())
    ordinary = tensors_of(replace(case, features=features))[0]
    return bounds(ordinary, options, oracle.answer(ordinary, options))


def check_other_memory(problems: Iterable[Problem], case: Case) -> None:
    """Assert that the same numbers in other memory have the same bits: a kept plan must not read the first memory."""
    for problem in problems:
        tensors = dict(problem.tensors)
        for name, memory in OTHER_MEMORY.items():
            if name in tensors and tensors[name].itemsize > 1 and "page" not in case.more:
                tensors[name] = restrided(tensors[name], memory)
        again = solve(tensors, problem.spec.options, problem.spec.direction, "cpu", calls=1)
        for name, t in again.outputs.items():
            assert same_bits(t, problem.outputs[name]), f"{name} has other bits in other memory"


def solve(tensors: dict[str, Tensor], options: Options, direction: Any, backend: str, calls: int = 2) -> Problem:
    """Run one problem so many times into outputs that were NaN before, with the same bits each time, and return it."""
    problem = Problem.create(tensors, options, direction)
    first: dict[str, Tensor] = {}
    for _ in range(calls):
        for t in problem.outputs.values():
            t.fill_(torch.nan)
        run([problem], backend)
        for name, t in problem.outputs.items():
            again = first.setdefault(name, t.clone())
            assert same_bits(again, t), f"{name} has other bits in the second call"
    return problem


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
