"""Compare the answers of a sample with float64, within the bounds of the judge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashpoint_kernels import Problem
from flashpoint_kernels.judging.exact.bounds import Limits, limits
from flashpoint_kernels.problems.problem import DTYPE_NAMES
from flashpoint_server.engine.verifying.samples import Sample

CHUNK = 1 << 13  # scores of a block: one takes 1 ms for a gradient
# Inputs beyond these magnitudes may overflow float32 or float16 inside a right kernel, where float64 does not. Answers
# to them are not judged.
_LARGEST = {"float64": 1e100}
_LARGEST_32 = 1e15
_LARGEST_DS = 3e4  # of dP in float16, in which a kernel may store dS


class Outcome(NamedTuple):
    """The result of a sample: right, imprecise, wrong or ill_posed. `worst` says where it is wrong, without values."""

    result: str
    worst: dict[str, Any]


def check(sample: Sample, pause: Callable[[], None]) -> Outcome:
    """Return the outcome of a sample. Rows that are ill-posed are left out, and so are inputs of extreme magnitude."""
    problem = sample.problem()
    if not judgeable(problem, pause):
        return Outcome("ill_posed", {})
    names = tuple(sample.answers)
    found, ill = limits(problem, names, pause, chunk=CHUNK, queries=sample.rows, pause=pause)
    left_out = problem.canonical("lse", ill)[:, :, sample.rows.start : sample.rows.stop, None]
    judged, imprecise = False, False
    for name, bound in found.items():
        pause()
        answer, of_rows = sample.answers[name], name in ("o", "lse", "dq")
        if not of_rows and bool(left_out.any()):  # the sum over queries contains those of ill-posed rows
            continue
        if of_rows:
            rows = slice(sample.rows.start, sample.rows.stop)
            bound = Limits(*(t[:, :, rows] for t in (bound.value, bound.accurate, bound.allowed)))
        left = (left_out[..., 0] if name == "lse" else left_out) if of_rows else left_out.new_zeros(())
        finite = bound.value.isfinite() | (bound.value == -math.inf)
        skipped = left | ~finite | ~bound.allowed.isfinite()
        judged |= not bool(skipped.all())
        strict, loose = (t.masked_fill(skipped, 0.0) for t in bound.excess(answer, DTYPE_NAMES[answer.dtype]))
        if bool((loose > 1).any()):
            return Outcome("wrong", _place(name, loose, sample))
        imprecise |= bool((strict > 1).any())
    if not judged:
        return Outcome("ill_posed", {})
    return Outcome("imprecise" if imprecise else "right", {})


def judgeable(problem: Problem, pause: Callable[[], None]) -> bool:
    """Return whether all numbers of a problem are finite, and none is so large that a right kernel may overflow."""
    spec, largest = problem.spec, {}
    for name, t in problem.tensors.items():
        if not t.is_floating_point() or not t.numel():
            continue
        pause()
        size = t.float() if t.itemsize == 1 else t
        if name == "attn_mask":  # −∞ hides a key
            size = size.masked_fill(size == -math.inf, 0.0)
        largest[name] = size.abs().max().item()
        if not largest[name] <= _LARGEST.get(spec.dtype, _LARGEST_32):
            return False
    gradient = largest.get("do", 0.0) * largest.get("v", 0.0) * spec.value_dim + largest.get("dlse", 0.0)
    return spec.dtype != "float16" or gradient <= _LARGEST_DS


def _place(name: str, loose: Tensor, sample: Sample) -> dict[str, Any]:
    """Return where an answer is wrong: its name, the number of wrong elements, and the index of the worst one."""
    at = [int(n) for n in torch.unravel_index(loose.argmax(), loose.shape)]
    index = dict(zip(("head", "row", "column"), at[1:], strict=False))
    index["head"] += sample.first_head
    if name in ("o", "lse", "dq"):
        index["row"] += sample.about["queries"][0]
    else:
        index["head"] = sample.about["kv_head"]
    return {"tensor": name, "elements": int((loose > 1).sum()), "of": loose.numel(), "index": index}
