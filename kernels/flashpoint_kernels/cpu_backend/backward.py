"""The gradient on the CPU by the kernels in C (flashpoint_kernels.native), with all options.

The bits of a row of dq depend only on the row and on the keys that it sees, those of dk and dv only on their sequence:
none of them depends on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.cpu_backend.forward import in_rows, mask_of, numbers_of, repeats
from flashpoint_kernels.native.backward import Backward, Sequence, Step
from flashpoint_kernels.native.calls import Replay
from flashpoint_kernels.native.forward import Dropped
from flashpoint_kernels.problems.problem import Problem

_IN_ROWS = ("q", "k", "v", "o", "do")


def differentiate(problem: Problem, threads: int) -> None:
    """Write the gradients of all sequences with queries, on at most `threads` threads.

    With `threads` above 1, do not call it in a thread of `reproducible.spread`: it may wait for other threads of
    that pool.
    """
    t = {name: problem.view(name) for name in _IN_ROWS}
    t |= {name: problem.view(name).float() for name in ("lse", "dlse") if name in problem.tensors}
    t |= {name: problem.view(name).contiguous() for name in ("alibi_slopes", "sinks") if name in problem.tensors}
    t |= {name: problem.view(name) for name in problem.outputs}
    if (mask := mask_of(problem)) is not None:
        t["attn_mask"] = mask
    if "block_mask" in problem.tensors:
        t["block_mask"] = problem.canonical("block_mask", problem.tensors["block_mask"].contiguous())
    total = None if "dattn_mask" not in problem.outputs or _of_each_score(problem) else _sum_of_masks(problem)
    if total is not None:
        t["dattn_mask"] = total.view("dattn_mask")
    dsinks = gradients(problem.spec, problem.rows, t, threads, problem.seed, problem.first_head, adds=total is not None)
    if dsinks is not None:
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


def gradients(
    spec: Spec,
    rows: Iterable[Row],
    t: Mapping[str, Tensor],
    threads: int,
    seed: int | None = None,
    first_head: int = 0,
    adds: bool = False,
) -> Tensor | None:
    """Write dq, dk, dv and dattn_mask, if `t` contains them. Return dsinks, (Hq,) float64, if `t` contains it.

    With `adds`, add to dattn_mask. `t` has canonical views (see `problem`), with o and lse of the forward. `threads` is
    as in `differentiate`.
    """
    p = spec.options.dropout_p
    backward = Backward(
        {name: in_rows(x) if name in _IN_ROWS else x for name, x in t.items()}, spec.scale, spec.options.softcap,
        1.0 - p, Dropped.of(seed, p), first_head, adds, spec.options.block_size,
    )  # fmt: skip
    backward.run(_shares(backward, spec, [row for row in rows if row.q_len], threads))
    return backward.finish()


def _shares(backward: Backward, spec: Spec, rows: list[Row] | tuple[Row, ...], threads: int) -> list[list[Step]]:
    """Return the work for all sequences with queries, cut into shares for at most `threads` threads."""
    if backward.takes_together(len(rows), max((row.q_len for row in rows), default=0)):
        return backward.shares_together(_sequence(spec, Row(*numbers_of(rows))), threads)
    return backward.shares([_sequence(spec, row) for row in rows], threads)


def prepared(problem: Problem, threads: int) -> Callable[[], None] | None:
    """Return a function that does what `differentiate` does, also after other values were written into the tensors.

    The function holds views of the tensors, not the problem. Return None where views are not enough: tensors must be
    copied, `repeats(problem)` is false, or lse has a gradient.
    """
    t = {name: problem.view(name) for name in (*_IN_ROWS, "lse")} | {n: problem.view(n) for n in problem.outputs}
    rows = [row for row in problem.rows if row.q_len]
    if not rows or not repeats(problem) or "dlse" in problem.tensors or any(t[n].stride(-1) != 1 for n in _IN_ROWS):
        return None
    backward = Backward(t, problem.spec.scale, problem.spec.options.softcap, 1.0, Dropped(), 0, False)
    return backward.call(_shares(backward, problem.spec, rows, threads))


def differentiate_dense(spec: Spec, t: Mapping[str, Tensor], threads: int) -> Replay | None:
    """Write dq, dk and dv of a plain problem, whose tensors `t` are q, k, v, do, o, lse, dq, dk and dv.

    Return a call that does this for other tensors with the same strides, given in the order of `t`. Return None if
    tensors were copied, if several parts of a sequence are summed, or if there are too many sequences.
    """
    in_place = {name: in_rows(x) if name in _IN_ROWS else x for name, x in t.items()}
    backward = Backward(in_place, spec.scale, spec.options.softcap, 1.0, Dropped(), 0, False)
    shares = _shares(backward, spec, spec.rows({}), threads)
    backward.run(shares)
    backward.finish()
    if any(in_place[name] is not x for name, x in t.items()):
        return None
    return backward.replay(shares, {name: x.data_ptr() for name, x in t.items()})


def _sequence(spec: Spec, row: Row) -> Sequence:
    """Return a `Sequence` for `row`; it represents many sequences if the members of `row` are arrays."""
    offset, (left, right) = row.offset, spec.window
    return Sequence(
        row.batch,
        row.q_start,
        row.kv_start,
        row.index,
        row.q_len,
        row.kv_len,
        offset - left,
        offset + right + 1,
        offset,
    )
