"""Find the known mistake of attention kernels that explains wrong answers.

Each mistake is the same problem with one change, solved in float64. It explains an answer that is within four times the
bound of a right answer, or if it leaves at most 1% of the error. Each mistake costs one float64 solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_contract.options import Direction, Options, ProblemError
from flashpoint_contract.tensors import ANSWERS, TAKEN, TENSORS
from flashpoint_kernels.problem import Problem
from flashpoint_kernels.reference_backend import formula

_SLACK = 4.0  # times the bound for right answers
_LEFT = 0.01  # maximum fraction of the error that a mistake may leave: larger scores have larger rounding errors
_BASE_2 = "lse is in base 2: multiply it by ln 2"
_LIKE = 1e-3  # maximum difference from a multiple of the right answer, relative to its largest value


class Mistake(NamedTuple):
    """A likely mistake: the options or tensors that the kernel used instead of the given ones."""

    text: str
    tensors: Mapping[str, Tensor]
    options: Options


def explain(
    tensors: Mapping[str, Tensor], options: Options, answers: Mapping[str, Tensor], wrong: Mapping[str, float]
) -> dict[str, str]:
    """Return, for each wrong answer, the known mistake that explains it, if there is one.

    The arguments are those of `verification.verify` with `answers`. `wrong` has the bound of each wrong answer.
    """
    right = _solved(Mistake("", tensors, options), wrong)
    explained = {}
    for name in wrong:
        if (text := _of_the_answer(name, answers[name].double(), right[name], options)) is not None:
            explained[name] = text
    for mistake in _mistakes(tensors, options):
        left = {name: bound for name, bound in wrong.items() if name not in explained}
        if not left:
            break
        try:
            theirs = _solved(mistake, left)
        except ProblemError:
            continue
        for name, bound in left.items():
            answer = answers[name].double()
            near = max(_SLACK * bound, _LEFT * _largest(answer - right[name]))
            if name in theirs and _near(answer, theirs[name], near):
                explained[name] = mistake.text
            elif name == "lse" and _near(answer * math.log(2), theirs[name], near):
                explained[name] = f"{mistake.text}; and {_BASE_2}"
    return explained


def _solved(mistake: Mistake, names: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the named answers of a problem in float64."""
    solved: dict[str, Tensor] = {}
    solve: dict[Direction, Callable[[Problem, torch.dtype], None]] = {
        "forward": formula.solve_forward,
        "backward": formula.solve_backward,
    }
    for direction, solver in solve.items():
        wanted = [name for name in names if name in ANSWERS[direction]]
        if not wanted:
            continue
        inputs = {
            name: t for name, t in mistake.tensors.items() if name in TAKEN[direction] and name not in ("o", "lse")
        }
        problem = Problem.create(inputs, replace(mistake.options, return_lse=True), direction)
        outputs = {n: torch.empty_like(t, dtype=torch.float64) for n, t in problem.outputs.items() if n in wanted}
        problem = replace(problem, outputs=outputs)
        with torch.no_grad():
            solver(problem, torch.float64)
        solved |= problem.outputs
    return solved


def _near(answer: Tensor, theirs: Tensor, bound: float) -> bool:
    same = (answer == theirs) | (answer.isnan() & theirs.isnan())
    off = (answer - theirs).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf)
    return bool(off.max() <= bound) if off.numel() else False


def _largest(t: Tensor) -> float:
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _of_the_answer(name: str, answer: Tensor, right: Tensor, options: Options) -> str | None:
    """Return how this answer follows from the right answer, if it does."""
    largest = _largest(right)
    if not largest:
        return None
    near = _LIKE * largest
    finite = answer.isfinite() & right.isfinite()
    if name == "lse":
        if _near(answer * math.log(2), right, near):
            return _BASE_2
        return None
    axes = TENSORS[name].axes_in(options.layout, answer.ndim)
    turned = right.transpose(1, 2).reshape(answer.shape) if answer.ndim == 4 else right
    if answer.ndim == 4 and answer.shape[1] != answer.shape[2] and _near(answer, turned, near):
        return f"heads and rows are transposed in memory: {name} must be ({','.join(axes)})"
    a, r = answer[finite], right[finite]
    factor = float(a @ r / (r @ r))
    if factor and abs(factor - 1) > _LIKE and _near(answer / factor, right, near / min(1.0, abs(factor))):
        return f"it is {factor:.4g} times the right answer{_whose(factor, options)}"
    return None


def _whose(factor: float, options: Options) -> str:
    if options.scale and math.isclose(factor, 1 / options.scale, rel_tol=_LIKE):
        return ", which is 1/scale: the scale is missing"
    return ""


def _mistakes(tensors: Mapping[str, Tensor], options: Options) -> Iterator[Mistake]:
    """Yield the mistakes that are possible in this problem, the likely ones first."""

    def other(text: str, **changed: object) -> Mistake:
        return Mistake(text, tensors, replace(options, **changed))  # type: ignore[arg-type]

    def without(text: str, name: str) -> Mistake:
        return Mistake(text, {n: t for n, t in tensors.items() if n != name}, options)

    head_dim = tensors["q"].shape[-1]
    left, right = options.window
    if options.causal:
        yield other("the causal mask is missing", causal=False)
        if left < 0 and right < 0:
            yield other("the mask is shifted by one: a query sees one key too many", causal=False, window=(-1, 1))
        yield from _strict(tensors, options)
        aligned = "top_left" if options.causal_alignment == "bottom_right" else "bottom_right"
        yield other(f"the mask is aligned {aligned.replace('_', ' ')} (`causal_alignment`)", causal_alignment=aligned)
    else:
        yield other("a causal mask was used, but not requested", causal=True)
    yield other("the scale is missing: scores are not multiplied by it", scale=1.0)
    yield other("the scale is 1/D instead of 1/sqrt(D)", scale=1 / head_dim)
    if options.scale is not None:
        yield other("the scale is used twice", scale=options.scale**2)
        yield other("the scale is 1/sqrt(D), not the requested one", scale=None)
    if left >= 0:
        yield other("the window is shifted by one: one key too many on the left", window=(left + 1, right))
        yield other("the window is missing on the left", window=(-1, right))
        if left:
            yield other("the window is shifted by one: one key too few on the left", window=(left - 1, right))
    if options.softcap:
        yield other("the softcap is missing", softcap=0.0)
    yield from _heads(tensors, options)
    for name, row in TENSORS.items():
        if name in tensors and row.direction == "forward" and not row.required and row.layouts != ("thd",):
            yield without(f"{name} is ignored", name)
    if "alibi_slopes" in tensors:
        turned = dict(tensors) | {"alibi_slopes": -tensors["alibi_slopes"]}
        yield Mistake("alibi_slopes are added, but must be subtracted", turned, options)
    if "attn_mask" in tensors and tensors["attn_mask"].dtype == torch.bool:
        turned = dict(tensors) | {"attn_mask": ~tensors["attn_mask"]}
        yield Mistake("attn_mask is inverted: true means that a key is visible", turned, options)


def _strict(tensors: Mapping[str, Tensor], options: Options) -> Iterator[Mistake]:
    """Yield a causal mask that hides the diagonal, if no other mask is in the way."""
    if options.layout == "thd" or any(name in tensors for name in ("attn_mask", "q_lengths", "kv_lengths")):
        return
    q_len, kv_len = (tensors[n].shape[-2 if options.layout == "bhsd" or tensors[n].ndim < 4 else 1] for n in "qk")
    offset = kv_len - q_len if options.causal_alignment == "bottom_right" else 0
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=tensors["q"].device).tril(offset - 1)
    text = "the mask is shifted by one: a query does not see its own key"
    yield Mistake(text, dict(tensors) | {"attn_mask": seen}, options)


def _heads(tensors: Mapping[str, Tensor], options: Options) -> Iterator[Mistake]:
    """Yield wrong orders of heads: key heads in turn instead of in groups."""
    q, k, v = (tensors[n] for n in "qkv")
    if q.ndim < 4 and options.layout != "thd":
        return
    axis = 1 if options.layout == "bhsd" else q.ndim - 2
    q_heads, kv_heads = q.shape[axis], k.shape[axis]
    if 1 < kv_heads < q_heads:
        order = torch.arange(q_heads, device=q.device) % kv_heads
        turned = dict(tensors) | {"k": k.index_select(axis, order), "v": v.index_select(axis, order)}
        text = f"query head h uses key head h % {kv_heads}, not h // {q_heads // kv_heads}"
        yield Mistake(text, turned, options)
