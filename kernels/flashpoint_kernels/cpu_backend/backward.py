"""The gradient on the CPU by the kernels in C (flashpoint_kernels.native), with all options.

The bits of a row of dq depend only on the row and on the keys that it sees, those of dk and dv only on their sequence:
none of them depends on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flashpoint_contract.spec import Spec
from flashpoint_kernels.cpu_backend.forward import IN_ROWS, in_rows, readable, repeats
from flashpoint_kernels.native.backward import Backward
from flashpoint_kernels.native.calls import Replay
from flashpoint_kernels.problems.problem import Problem


def differentiate(problem: Problem, threads: int) -> None:
    """Write the gradients of all sequences with queries, on at most `threads` threads.

    With `threads` above 1, do not call it in a thread of `reproducible.spread`: it may wait for other threads of
    that pool.
    """
    t = readable(problem)
    total = None if "dattn_mask" not in problem.outputs or _of_each_score(problem) else _sum_of_masks(problem)
    if total is not None:
        t["dattn_mask"] = total.view("dattn_mask")
    backward = Backward(problem.spec, t, problem.seed, problem.first_head, adds=total is not None)
    backward.run(backward.shares([row for row in problem.rows if row.q_len], threads))
    if (dsinks := backward.finish()) is not None:
        problem.outputs["dsinks"].copy_(dsinks)
    if total is not None:
        problem.own_part("dattn_mask").copy_(total.own_part("dattn_mask"))


def _of_each_score(problem: Problem) -> bool:
    """Return whether the mask has one element per score, in a dtype that the kernels can write."""
    mask = problem.tensors["attn_mask"]
    return mask.dtype != torch.float64 and mask.numel() == math.prod(problem.spec.shape_of("attn_mask"))


def _sum_of_masks(problem: Problem) -> Problem:
    """Return the problem with new memory for dattn_mask: zeros in float32, to which its sequences add.

    The zeros are numpy's, which occupy memory only where they are written: a part of a problem has memory of the shape
    of the whole dattn_mask, but writes only that of its own sequences.
    """
    zeros = np.zeros(problem.outputs["dattn_mask"].shape, np.float32)
    return replace(problem, outputs={"dattn_mask": torch.from_numpy(zeros)})


def prepared(problem: Problem, threads: int) -> Callable[[], None] | None:
    """Return a function that does what `differentiate` does, also after other values were written into the tensors.

    The function holds views of the tensors, not the problem. Return None where views are not enough: tensors must be
    copied, `repeats(problem)` is false, or lse has a gradient.
    """
    rows = [row for row in problem.rows if row.q_len]
    if not rows or not repeats(problem) or "dlse" in problem.tensors:
        return None
    backward = Backward(problem.spec, readable(problem))
    return backward.call(backward.shares(rows, threads))


def differentiate_dense(spec: Spec, t: Mapping[str, Tensor], threads: int) -> Replay | None:
    """Write dq, dk and dv of a plain problem, whose tensors `t` are q, k, v, do, o, lse, dq, dk and dv.

    Return a call that does this for other tensors with the same strides, given in the order of `t`. Return None if
    tensors were copied, if several parts of a sequence are summed, or if there are too many sequences.
    """
    in_place = {name: in_rows(x) if name in IN_ROWS else x for name, x in t.items()}
    backward = Backward(spec, in_place)
    shares = backward.shares(spec.rows({}), threads)
    backward.run(shares)
    backward.finish()
    if any(in_place[name] is not x for name, x in t.items()):
        return None
    return backward.replay(shares, {name: x.data_ptr() for name, x in t.items()})
