"""The kernels in C as a backend: every problem of the features in native.SUPPORT, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.torch_backend.backward import differentiate
from flashpoint_kernels.torch_backend.forward import prepared, repeats


def forward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        for call in problem.calls or _calls(problem):
            call()


def _calls(problem: Problem) -> Sequence[Callable[[], object]]:
    """Clear the outputs' gaps, and return the calls of a forward.

    They are kept with the problem if they stay right when its tensors get other numbers.
    """
    problem.clear_outputs()
    rows = [row for row in problem.rows if row.q_len]
    calls = [prepared(problem, rows, problem.threads or 1)] if rows else []
    if repeats(problem) and not problem.has_gaps:
        problem.calls = calls
    return calls


def backward(problems: Sequence[Problem]) -> None:
    """Compute gradients from the forward's `o` and `lse`."""
    for problem in problems:
        problem.clear_outputs()
        differentiate(problem, problem.threads or 1)
