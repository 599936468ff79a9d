"""Judge answers that were computed elsewhere, for a problem of any layout: errors, wrong elements and causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashpoint_contract.judging import Cause
from flashpoint_contract.options import ProblemError
from flashpoint_contract.spec import Row
from flashpoint_contract.tensors import TENSORS
from flashpoint_kernels.judging.cases import OUTPUTS, Case
from flashpoint_kernels.judging.exact import bounds, places
from flashpoint_kernels.judging.exact.bounds import Limits
from flashpoint_kernels.judging.naming.matching import LEFT, WrongNumbers, causes_of
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.quantization import scaled
from flashpoint_kernels.reference_backend import formula

_SMALL = 300_000  # largest number of scores of sequences whose wrong answers are compared with known mistakes
_MOST = 3  # largest number of causes in a report
_UNLIKE = ("sinks", "block_mask", "dlse", "offset")  # options for which the catalogue has no known mistakes


@dataclass(frozen=True, eq=False)
class Held:
    """The comparison of an answer with its error bounds."""

    limits: Limits
    excess: float  # the largest ratio of an error to the bound `limits.allowed`; more than 1 is wrong
    where: str  # which sequences, heads, rows and columns are wrong
    imprecise: bool

    @property
    def ok(self) -> bool:
        return self.excess <= 1


def held(
    problem: Problem, answers: Mapping[str, Tensor], usual: Callable[[str, Tensor], float], block: Callable[[], None]
) -> dict[str, Held]:
    """Compare the answers of a problem with their bounds.

    S and L are the bounds of `exact.bounds`. An error of at most S is allowed. A larger error is allowed if it is below
    L and below `usual(name, exact answer)`: the largest error of the plain formula in the problem's data type, with a
    margin. An allowed error above S or above `usual` is imprecise. `block` is called `bounds.blocks(problem)` times.
    """
    limits, _ = bounds.limits(problem, tuple(answers), block)
    held_answers = {}
    for name, answer in answers.items():
        limit = limits[name]
        usual_error = usual(name, limit.value)
        limit = replace(limit, allowed=torch.maximum(limit.accurate, limit.allowed.clamp_max(usual_error)))
        dtype = "float32" if name == "lse" else problem.spec.dtype
        strict, loose = limit.excess(answer, dtype)
        where = ""
        if name in OUTPUTS and bool((loose > 1).any()):
            where = places.where(problem.canonical(name, loose > 1), name)
        largest = [float(each.max()) if each.numel() else 0.0 for each in (loose, strict)]
        unlike = bool(((answer.double() - limit.value).abs() > usual_error).any())
        held_answers[name] = Held(limit, largest[0], where, largest[0] <= 1 and (largest[1] > 1 or unlike))
    return held_answers


def explain(
    problem: Problem, answers: Mapping[str, Tensor], held_answers: Mapping[str, Held], block: Callable[[], None]
) -> list[Cause]:
    """Return the known mistakes that reproduce the wrong answers of a problem."""
    wrong = [name for name in held_answers if not held_answers[name].ok and name in OUTPUTS]
    if not wrong or sum(row.q_len * row.kv_len for row in problem.rows) * problem.spec.q_heads > 10 * _SMALL:
        return []
    causes = [Cause("input-ignored", f"{name} is ignored", f"read {name}", True, len(names))
              for name, names in _ignored(problem, answers, held_answers, wrong, block)]  # fmt: skip
    if not causes:
        for w in _dense(problem, answers, held_answers, wrong):
            block()
            # First look for a mistake that explains all wrong outputs, then for a mistake in each single output.
            for names in dict.fromkeys([w.names, *((name,) for name in w.names)]):
                mistakes = causes_of(replace(w, names=names))
                causes += [Cause(m.code, m.text, m.advice, True, len(names)) for m in mistakes]
                if mistakes and names == w.names:
                    break
            if causes:
                break
    return list({cause.code: cause for cause in reversed(causes)}.values())[::-1][:_MOST]


def _ignored(
    problem: Problem, answers: Mapping[str, Tensor], held_answers: Mapping[str, Held], wrong: Sequence[str],
    block: Callable[[], None],
) -> Iterator[tuple[str, list[str]]]:  # fmt: skip
    """Yield (optional input, wrong answers) where the answers are right for the problem without that input."""
    given = {n: t for n, t in problem.tensors.items() if n not in ("o", "lse")}
    options = replace(problem.spec.options, return_lse=True)
    for name, row in TENSORS.items():
        if name not in given or row.direction != "forward" or row.required or row.layouts == ("thd",):
            continue
        block()
        try:
            other = Problem.create({n: t for n, t in given.items() if n != name}, options, problem.spec.direction)
        except ProblemError:
            continue
        outputs = {n: torch.empty_like(t, dtype=torch.float64) for n, t in other.outputs.items() if n in wrong}
        other = replace(other, outputs=outputs)
        solve = formula.solve_forward if problem.spec.direction == "forward" else formula.solve_backward
        with torch.no_grad():
            solve(other, torch.float64)
        hit = [n for n, theirs in outputs.items() if _left(answers[n], theirs, held_answers[n].limits.value) < LEFT]
        if hit:
            yield name, hit


def _left(answer: Tensor, theirs: Tensor, exact: Tensor) -> float:
    """Return the fraction of an answer's error that remains if the expected answer is `theirs`, not `exact`."""
    answer = answer.double()
    finite = answer.isfinite() & exact.isfinite() & theirs.isfinite()
    off = float((answer - exact)[finite].norm())
    return float((answer - theirs)[finite].norm()) / off if off else 1.0


def _dense(
    problem: Problem, answers: Mapping[str, Tensor], held_answers: Mapping[str, Held], wrong: Sequence[str]
) -> Iterator[WrongNumbers]:
    """Yield wrong answers as at most two problems in layout bhsd, the smallest first.

    Each consists of sequences of equal lengths, with a wrong answer among them.
    """
    spec = problem.spec
    slopes = problem.tensors.get("alibi_slopes")
    if spec.options.dropout_p or any(spec.has(name) for name in _UNLIKE) or (slopes is not None and slopes.ndim > 1):
        return
    inputs = {n: t for n, t in problem.tensors.items() if n not in ("o", "lse")}
    parts = [
        {n: answers[n] for n in wrong},
        *({n: getattr(held_answers[n].limits, field) for n in wrong} for field in ("value", "accurate", "allowed")),
    ]
    views = [replace(problem, tensors=inputs, outputs=each) for each in parts]
    together = lambda row: max(1, _SMALL // max(1, spec.q_heads * row.q_len * row.kv_len))  # noqa: E731
    groups = []
    for (rows, x), (_, value), (_, accurate), (_, allowed) in zip(
        *(view.batches(together) for view in views), strict=True
    ):
        limits = {n: Limits(*(t[n].to("cpu", copy=True) for t in (value, accurate, allowed))) for n in wrong}
        part = {n: x[n].to("cpu", copy=True) for n in wrong}
        bad = tuple(n for n in OUTPUTS if n in wrong and _is_wrong(limits[n], part[n], spec.dtype))
        if bad and rows[0].q_len * rows[0].kv_len * spec.q_heads <= _SMALL:
            case, tensors = _case(problem, rows, x)
            top_left = spec.options.causal_alignment == "top_left"
            groups.append(WrongNumbers(case, tensors, top_left, part, limits, bad))
    yield from sorted(groups, key=lambda w: w.case.scores)[:2]


def _is_wrong(limits: Limits, answer: Tensor, dtype: str) -> bool:
    return bool((limits.excess(answer, dtype)[1] > 1).any())


def _case(problem: Problem, rows: Sequence[Row], x: Mapping[str, Tensor]) -> tuple[Case, dict[str, Tensor]]:
    spec, options = problem.spec, problem.spec.options
    tensors = {n: x[n].clone() for n in ("q", "k", "v", "do") if n in x}
    if spec.quantized:
        tensors |= {n: scaled(x[n], x[f"{n}_scale"], torch.float64) for n in "kv"}
    mask, extras = "", tuple(name for name in ("alibi_slopes",) if spec.has(name))
    if spec.has("attn_mask"):
        tensors["attn_mask"] = problem.mask_part(problem.tensors["attn_mask"], rows)
        mask = "bool" if tensors["attn_mask"].dtype == torch.bool else "float"
    if spec.has("alibi_slopes"):
        tensors["alibi_slopes"] = problem.tensors["alibi_slopes"].expand(spec.q_heads)
    case = Case(
        batch=len(rows), q_heads=spec.q_heads, kv_heads=spec.kv_heads, q_len=rows[0].q_len, kv_len=rows[0].kv_len,
        head_dim=spec.head_dim, value_dim=spec.value_dim, dtype=spec.dtype, causal=options.causal,
        window=options.window, softcap=options.softcap, scale=options.scale, mask=mask, extras=extras,
    )  # fmt: skip
    return case, {n: t.cpu() for n, t in tensors.items()}
