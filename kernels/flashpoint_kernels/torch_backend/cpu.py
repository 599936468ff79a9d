"""The kernels in C as a backend: every problem of the features in native.SUPPORT, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.torch_backend.backward import differentiate
from flashpoint_kernels.torch_backend.forward import prepared, repeats


def forward(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.clear_outputs()
        if problem.calls:
            for call in problem.calls:
                call()
        elif rows := [row for row in problem.rows if row.q_len]:
            call = partial(prepared(problem, rows), problem.threads or 1)
            call()
            if repeats(problem):
                problem.calls = [call]


def backward(problems: Sequence[Problem]) -> None:
    """Compute gradients from the forward's `o` and `lse`."""
    for problem in problems:
        problem.clear_outputs()
        differentiate(problem, problem.threads or 1)
