"""Tangents of a float32 forward on the CPU by the kernel in C (native/tangent.c); `IN_DERIVATIVES` has its options."""

from __future__ import annotations

from collections.abc import Sequence

from flashpoint_kernels.cpu_backend.forward import in_rows
from flashpoint_kernels.native import tangent
from flashpoint_kernels.problems.problem import Problem


def solve(problems: Sequence[Problem]) -> list[Problem]:
    """Write the outputs of each problem's `tangents`.

    Return the problems that the kernel leaves to another backend: with infinities, NaN, or numbers whose products may
    overflow.
    """
    return [problem for problem in problems if not _solve(problem)]


def _solve(problem: Problem) -> bool:
    of_tangents = problem.tangents
    assert of_tangents is not None, "a problem with a direction"
    of_tangents.clear_outputs()
    if of_tangents.has_gaps:
        of_tangents.own_part("lse").zero_()  # the tangent of −∞
    if not (rows := [row for row in problem.rows if row.q_len]):
        return True
    t = {name: in_rows(problem.canonical(name, problem.tensors[name])) for name in ("q", "k", "v", "o")}
    t["lse"] = problem.canonical("lse", problem.tensors["lse"]).float()
    t |= {f"{name}_dot": in_rows(of_tangents.canonical(name, x)) for name, x in of_tangents.tensors.items()}
    t |= {f"{name}_dot": of_tangents.canonical(name, x) for name, x in of_tangents.outputs.items()}
    return tangent.compute(problem.spec, t, rows, problem.threads or 1)
