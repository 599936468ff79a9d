"""The gradient on the CPU by the kernels in C (flashpoint_kernels.native): all options but block masks.

The bits of a gradient depend neither on other sequences nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.native.backward import Backward, Place, Sequence
from flashpoint_kernels.native.forward import Dropped
from flashpoint_kernels.problem import Problem
from flashpoint_kernels.torch_backend.forward import in_rows, mask_of


def differentiate(problem: Problem, threads: int) -> None:
    """Write the gradients of all sequences with queries, on at most `threads` threads.

    The caller must not be one of the threads of `spread`.
    """
    t = {name: problem.view(name) for name in ("q", "k", "v", "o", "do")}
    t |= {name: problem.view(name).float() for name in ("lse", "dlse") if name in problem.tensors}
    t |= {n: problem.view(n).contiguous() for n in ("alibi_slopes", "sinks") if n in problem.tensors}
    t |= {name: problem.view(name) for name in ("dq", "dk", "dv", "dattn_mask", "dsinks") if name in problem.outputs}
    if (mask := mask_of(problem)) is not None:
        t["attn_mask"] = mask
    dsinks = gradients(problem.spec, problem.rows, t, threads, problem.seed, problem.first_head)
    if dsinks is not None:
        problem.outputs["dsinks"].copy_(dsinks)


def gradients(
    spec: Spec, rows: Iterable[Row], t: Mapping[str, Tensor], threads: int, seed: int | None = None, first_head: int = 0
) -> Tensor | None:
    """Write dq, dk, dv and dattn_mask, as far as `t` has them. Return dsinks, (Hq,) float64, if `t` has it.

    `t` has canonical views (see `problem`), with o and lse of the forward. For threads see `differentiate`.
    """
    t = {name: in_rows(x) if name in ("q", "k", "v", "o", "do") else x for name, x in t.items()}
    options, mask, sinks = spec.options, t.get("attn_mask"), t.get("sinks")
    backward = Backward(
        t["q"].dtype, spec.head_dim, spec.value_dim, spec.kv_heads, spec.q_heads // spec.kv_heads, spec.scale,
        options.softcap, torch.bool if mask is None else mask.dtype,
        0 if mask is None else mask.stride(3) * mask.itemsize, 1.0 - options.dropout_p,
        Dropped.of(seed, options.dropout_p), first_head, 0 if sinks is None else sinks.data_ptr(), "dsinks" in t, t,
    )  # fmt: skip
    backward.sequences += (_sequence(spec, row, t) for row in rows if row.q_len)
    return backward.compute(threads)


def _sequence(spec: Spec, row: Row, t: Mapping[str, Tensor]) -> Sequence:
    offset, (left, right) = spec.offset(row.q_len, row.kv_len), spec.window

    def queries(name: str) -> Place:
        return Place.of(t.get(name), row.batch, row.q_start)

    def keys(name: str) -> Place:
        return Place.of(t.get(name), row.batch, row.kv_start)

    def view(name: str) -> Tensor | None:
        return t[name][row.batch, :, row.kv_start : row.kv_start + row.kv_len] if name in t else None

    slopes = t.get("alibi_slopes")
    own = slopes is not None and slopes.ndim == 2
    return Sequence(
        queries("q"), queries("o"), queries("do"), queries("lse"), queries("dlse"), keys("k"), keys("v"),
        queries("dq"), keys("dk"), keys("dv"), queries("attn_mask"), queries("dattn_mask"),
        0 if slopes is None else slopes.data_ptr() + (4 * spec.q_heads * row.index if own else 0),
        row.q_len, row.kv_len, offset - left, offset + right + 1, offset, row.index, view("dk"), view("dv"),
    )  # fmt: skip
