"""The operator `flashpoint::key_weights`: how much attention keys receive, from all queries or from single ones.

It always goes through torch's dispatcher. It has no gradient: a backward pass through its answer is an error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_contract.tensors import EIGHT_BIT, FORWARD_TENSORS
from flashpoint_kernels.dispatching.dispatch import backend_for, run
from flashpoint_kernels.operators import sharding
from flashpoint_kernels.operators.solving import literal
from flashpoint_kernels.operators.torch_rules import refuse_transforms
from flashpoint_kernels.problems.memory import in_memory
from flashpoint_kernels.problems.problem import DTYPES, Problem

_INPUTS = tuple(name for name in FORWARD_TENSORS if name not in ("v", "v_scale"))
_EIGHT_BIT = frozenset(DTYPES[name] for name in EIGHT_BIT)

_library = torch.library.Library("flashpoint", "FRAGMENT")  # type: ignore[no-untyped-call]
_schema = ", ".join(f"Tensor{'' if name in 'qk' else '?'} {name}" for name in (*_INPUTS, "lse"))
_library.define(  # type: ignore[no-untyped-call]
    f"key_weights({_schema}, int[]? rows, str options) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)


def key_weights(
    tensors: Mapping[str, Tensor | None], options: Options, lse: Tensor | None = None, rows: Sequence[int] | None = None
) -> Tensor:
    """Return the sums of the probabilities over the queries, (B,Hq,Sk), in the shapes of `Spec.outputs`.

    `lse` is the forward's, if it is known. With `rows`, return the probabilities of these queries: (B,Hq,R,Sk).
    """
    inputs = [tensors.get(name) for name in _INPUTS]
    refuse_transforms([*tensors.items(), ("lse", lse)])
    if not torch.compiler.is_compiling():
        sharding.refuse("key_weights" if rows is None else "attention_weights", inputs)
    weights: Tensor = torch.ops.flashpoint.key_weights.default(*inputs, lse, rows, _text(options))
    return weights


def _text(options: Options) -> str:
    """Return the options as text for the operator; without dropout, before which the probabilities are summed."""
    return literal(replace(options, dropout_p=0.0, dropout_seed=None))


@lru_cache(256)
def _options_of(text: str) -> Options:
    return Options(**ast.literal_eval(text), return_key_weights=True)


def _named(arguments: Sequence[Any]) -> tuple[dict[str, Tensor], Tensor | None, Sequence[int] | None, Options]:
    *inputs, lse, rows, text = arguments
    given = {name: t for name, t in zip(_INPUTS, inputs, strict=True) if t is not None}
    return given, lse, rows, _options_of(text)


def _key_weights(*arguments: Any) -> Tensor:
    given, lse, rows, options = _named(arguments)
    problem = _created(given, options)
    if rows is not None:
        calls = [_created(*_of_row(problem, given, row)) for row in rows]
        shape = problem.spec.outputs["key_weights"].shape
        answers = [_weighed(call) for call in calls]
        return torch.stack(answers, -2) if answers else given["q"].new_zeros(
            *shape[:-1], 0, shape[-1], dtype=torch.float32
        )  # fmt: skip
    if lse is not None:
        outputs = {"key_weights": problem.outputs["key_weights"]}
        problem = replace(problem, tensors=problem.tensors | {"lse": in_memory("lse", lse)}, outputs=outputs)
    return _weighed(problem)


def _created(given: Mapping[str, Tensor], options: Options) -> Problem:
    """Return the problem of a call with values of one column, all 0: their forward is the cheapest that returns lse."""
    k = given["k"]
    eight = k.dtype in _EIGHT_BIT
    zero = torch.zeros((1,) * k.ndim, dtype=torch.int8 if eight else k.dtype, device=k.device)
    tensors = {"q": given["q"], "k": k, "v": zero.view(k.dtype).expand(*k.shape[:-1], 1), **given}
    if eight:
        tensors["v_scale"] = torch.ones((), dtype=torch.float32, device=k.device)
    return Problem.create(tensors, options, fixed_pages=True)


def _weighed(problem: Problem) -> Tensor:
    run([problem], backend_for(problem.spec, str(problem.device)))
    return problem.outputs["key_weights"]


def _of_row(problem: Problem, given: Mapping[str, Tensor], row: int) -> tuple[dict[str, Tensor], Options]:
    """Return the call of one query: number `row` of each sequence, or of the packed queries in layout `thd`."""
    spec, options, q = problem.spec, problem.spec.options, given["q"]
    axis = 0 if spec.ragged else q.ndim - 3 if options.layout == "bshd" and q.ndim == 4 else q.ndim - 2
    one = dict(given) | {"q": q.narrow(axis, row, 1)}
    places = [row - each.q_start if spec.ragged else row for each in problem.rows]  # in the sequence
    inside = [0 <= place < each.q_len for place, each in zip(places, problem.rows, strict=True)]
    offsets = [
        each.offset + place if seen else 0 for place, each, seen in zip(places, problem.rows, inside, strict=True)
    ]
    one["offset"] = _numbers(offsets)
    if spec.ragged:
        one["cu_seqlens_q"] = _numbers([int(any(inside[:n])) for n in range(len(inside) + 1)])
    elif "q_lengths" in given:
        one["q_lengths"] = _numbers(map(int, inside))
    if "attn_mask" in given and given["attn_mask"].ndim > 1 and given["attn_mask"].shape[-2] > 1:
        one["attn_mask"] = given["attn_mask"].narrow(-2, row, 1)
    if "block_mask" in given:
        one["block_mask"] = given["block_mask"].narrow(-2, row // options.block_size[0], 1)
    return one, replace(options, causal_alignment="bottom_right")


def _numbers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def _fake(*arguments: Any) -> Tensor:
    given, _, rows, options = _named(arguments)
    q, k = given["q"], given["k"]
    heads = q.shape[1] if options.layout != "bshd" else q.shape[-2]
    keys = k.shape[-3] if options.layout == "bshd" and k.ndim == 4 else k.shape[-2]
    lead = [*q.shape[:-2], keys] if q.ndim < 4 else [q.shape[0], heads, keys]
    if "block_table" in given:
        size = k.shape[2] if options.layout == "bhsd" else k.shape[1]
        lead = [given["block_table"].shape[0], heads, given["block_table"].shape[1] * size]
    elif options.layout == "thd":
        lead = [heads, k.shape[0]]
    shape = lead if rows is None else [*lead[:-1], len(rows), lead[-1]]
    return q.new_empty(shape, dtype=torch.float32)


def _refuse(_ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError("key weights have no gradient: detach() them, or compute them under torch.no_grad()")


_library.impl("key_weights", _key_weights, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("flashpoint::key_weights", _fake, lib=_library)
torch.library.register_autograd("flashpoint::key_weights", _refuse, lib=_library)
