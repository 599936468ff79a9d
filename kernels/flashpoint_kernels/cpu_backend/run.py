"""The kernels in C as a backend: on the CPU, for problems whose features are all in SUPPORT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from flashpoint_kernels.cpu_backend.backward import differentiate
from flashpoint_kernels.cpu_backend.backward import prepared as prepared_gradient
from flashpoint_kernels.cpu_backend.forward import prepared, repeats
from flashpoint_kernels.cpu_backend.ranges import is_tiny, with_moved
from flashpoint_kernels.problems.problem import Problem, forward_of

KEPT_BYTES = 1 << 19  # maximum bytes of o and lse that `Problem.calls` of a gradient keeps in memory


def forward(problems: Sequence[Problem]) -> None:
    """Compute o, and lse where it is requested."""
    _compute(problems, _calls)


def _compute(problems: Sequence[Problem], prepare: Callable[[Problem], Sequence[Callable[[], object]]]) -> None:
    """Compute problems by their stored calls, or by those that `prepare` returns."""
    for problem in problems:
        if not problem.calls and is_tiny(problem.spec.scale):
            with_moved(partial(_run_calls, prepare), problem)
        else:
            _run_calls(prepare, problem)


def _run_calls(prepare: Callable[[Problem], Sequence[Callable[[], object]]], problem: Problem) -> None:
    for call in problem.calls or prepare(problem):
        call()


def _calls(problem: Problem) -> Sequence[Callable[[], object]]:
    """Call `clear_outputs`, and return the functions that compute a forward.

    Store them in `problem.calls` if they stay valid when other values are written into the problem's tensors.
    """
    problem.clear_outputs()
    rows = [row for row in problem.rows if row.q_len]
    calls = [prepared(problem, rows, problem.threads or 1)] if rows else []
    if repeats(problem) and not problem.has_gaps:
        problem.calls = calls
    return calls


def backward(problems: Sequence[Problem]) -> None:
    """Compute gradients, and the forward's `o` and `lse` if they are missing."""
    _compute(problems, _gradient_calls)


def _gradient_calls(problem: Problem) -> Sequence[Callable[[], object]]:
    """Return the functions that compute a gradient, as `_calls` does; if `lse` is missing, also those of the forward.

    They are stored in `problem.calls` only if the outputs of this forward have at most KEPT_BYTES, and if no function
    refers to the problem: a problem that holds itself would keep its tensors until Python's collector runs.
    """
    calls: list[Callable[[], object]] = []
    whole, nbytes = problem, 0
    if "lse" not in problem.tensors:
        forward = forward_of(problem)
        calls += _calls(forward)
        whole = replace(problem, tensors=problem.tensors | forward.outputs)
        nbytes = sum(t.nbytes for t in forward.outputs.values())
    problem.clear_outputs()
    threads = problem.threads or 1
    gradient = prepared_gradient(whole, threads)
    if gradient is None:
        return [*calls, partial(differentiate, whole, threads)]
    calls.append(gradient)
    if not problem.has_gaps and nbytes <= KEPT_BYTES:
        problem.calls = calls
    return calls
