"""Derivatives along a direction, of the formula (formula.py) in float64, by torch's autograd.

With w = (do, dlse), g(w) = the gradients of <w, (o, lse)>, and ẋ the direction of the inputs: g is linear in w, so the
gradient of <g(w), ẋ> for w is the tangent of (o, lse), and its gradient for the inputs is the tangent of g(w) along ẋ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashpoint_contract.options import GRADS
from flashpoint_contract.spec import Row
from flashpoint_kernels.problems.modes import flushing
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.reference_backend.formula import (
    add_gradients,
    attend,
    chunks,
    inputs_of,
    of_queries,
    recordable,
    recording,
)

_DTYPE = torch.float64


@flushing(False)
def solve(problems: Sequence[Problem]) -> None:
    """Write the outputs of each problem's `tangents`."""
    for problem in problems:
        of_tangents = problem.tangents
        assert of_tangents is not None, "a problem with a direction"
        for name in of_tangents.outputs:
            of_tangents.own_part(name).zero_()
        shared: dict[str, Tensor] = {
            name: torch.zeros_like(of_tangents.own_part(name), dtype=_DTYPE)
            for name in ("dattn_mask", "dsinks")
            if name in of_tangents.outputs
        }
        for (row, x), (_, dots) in zip(problem.sequences(), of_tangents.sequences(), strict=True):
            if row.q_len:
                _sequence(problem, of_tangents, row, x, dots, shared)
        for name, total in shared.items():
            of_tangents.own_part(name).copy_(total)


def _sequence(
    problem: Problem, of_tangents: Problem, row: Row, x: dict[str, Tensor], dots: dict[str, Tensor],
    shared: dict[str, Tensor],
) -> None:  # fmt: skip
    inputs, directions = inputs_of(problem, row, x, _DTYPE), inputs_of(of_tangents, row, dots, _DTYPE)
    names = [name for name in GRADS if name in of_tangents.outputs]
    sums: dict[str, Tensor] = {
        name: torch.zeros_like(dots[name], dtype=_DTYPE) for name in ("dk", "dv") if name in names
    }
    sums |= {name: shared[name] for name in ("dsinks",) if name in shared}
    if "dattn_mask" in shared:
        sums["dattn_mask"] = of_tangents.mask_part(shared["dattn_mask"], [row])[0]
    for queries in chunks(problem, row):
        rows = slice(queries.start, queries.stop)
        given: dict[str, Tensor] = {name: x[name][:, rows].to(_DTYPE) for name in ("do", "dlse") if name in x}
        given_dots: dict[str, Tensor] = {
            name: dots[name][:, rows].to(_DTYPE) for name in ("do", "dlse") if name in dots
        }
        parts = of_queries(inputs, queries), of_queries(directions, queries)
        (o, lse), found = _along(problem, row, *parts, queries, given, given_dots, names)
        dots["o"][:, rows], dots["lse"][:, rows] = o, lse
        add_gradients(found, dots, sums, rows)
    for name in sums.keys() & {"dk", "dv"}:
        dots[name].copy_(sums[name])


def _along(
    problem: Problem, row: Row, inputs: dict[str, Tensor], directions: dict[str, Tensor], queries: range,
    given: dict[str, Tensor], given_dots: dict[str, Tensor], names: Sequence[str],
) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
    """Return the tangents of o and lse, and those of the gradients `names`, of these queries."""
    with recording():
        leaves = {name: recordable(t).detach() for name, t in inputs.items()}
        wanted = sorted({*directions, *(name[1:] for name in names)})
        leaves |= {name: leaves[name].requires_grad_() for name in wanted}
        answers = attend(problem, row, leaves, queries)
        seeds, dots = (
            [
                recordable(each[name]).detach() if name in each else torch.zeros_like(answer)
                for name, answer in zip(("do", "dlse"), answers, strict=True)
            ]
            for each in (given, given_dots)
        )
        seeds = [t.clone().requires_grad_() for t in seeds]
        inner = _inner(answers, seeds)
        ends = [*seeds, *(leaves[name[1:]] for name in names)]
        along = list(directions)
        first = torch.autograd.grad(
            inner, [leaves[name] for name in along], create_graph=True, allow_unused=True
        ) if along else ()  # fmt: skip
        total = _inner(answers, dots)  # its gradients are those for the tangents of do and dlse
        for name, g in zip(along, first, strict=True):
            if g is not None:
                total = total + (g * recordable(directions[name])).sum()
        found = torch.autograd.grad(total, ends, allow_unused=True)
    results = [torch.zeros_like(end) if t is None else t for end, t in zip(ends, found, strict=True)]
    return results[:2], dict(zip(names, results[2:], strict=True))


def _inner(answers: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return (answers[0] * weights[0]).sum() + (answers[1] * weights[1]).sum()
