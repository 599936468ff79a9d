"""Make a request (a `Question`) for each shard, and merge the answers exactly. This module does no I/O.

`forward` and `backward` are generators: they yield lists of questions, and receive the tensors of the answers.

The forward merges the answers lse_s and o_s of the shards s that hold the keys of a query. This is FlashAttention's
rescaling between servers (Flash-Decoding, Dao et al. 2023):

    lse = log Σ exp(lse_s)        o = Σ exp(lse_s − lse) · o_s

A sink is one more term of the first sum.

The backward sends each shard o and lse of the whole problem, so its gradients are exact parts of the whole, which are
summed (FlashAttention-2, Algorithm 2: P = exp(S − lse), dS = P ∘ (dP − rowsum(do ∘ o) + dlse)).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from flashpoint._calls import service
from flashpoint._shards.cut import UNBOUNDED
from flashpoint._shards.plan import Shard, ShardPlan
from flashpoint._shards.problem import Numbers, Problem
from flashpoint.errors import invalid
from flashpoint_contract.tensors import SCALES, TENSORS

_BACKWARD = ("q", "k", "v", "attn_mask", "do", "dlse")
_FORWARD = ("q", "k", "v", "attn_mask", *SCALES)
# Like a server, give no warning for infinite inputs and for results that are too large for float16.
_QUIET = np.errstate(invalid="ignore", over="ignore")
# Options of the problem that a question does not copy: the question has its own value, or the server does not need it.
_OWN = {"layout", "causal_alignment", "dropout_p", "dropout_seed", "return_lse", "grads"}


@dataclass(frozen=True)
class Question:
    """The request for one shard. Its tensors are views; `call` makes the call to send, with contiguous tensors."""

    shard: Shard
    tensors: dict[str, Numbers]
    options: dict[str, Any]

    @property
    def path(self) -> str:
        return "/attention/grad" if "do" in self.tensors else "/attention"

    def call(self, sending: dict[str, Any]) -> service.Call[Any]:
        tensors = {name: t.swapaxes(1, 2) if self._turned(name) else t for name, t in self.tensors.items()}
        q, k, v = (tensors.pop(name) for name in "qkv")
        keywords = {**tensors, **self.options, **sending, "with_meta": True}
        if "do" in keywords:
            return service.backward(keywords.pop("do"), q, k, v, keywords)
        return service.forward(q, k, v, keywords)

    def answers(self, tensors: Any) -> list[Numbers]:
        """Return the tensors of an answer as views (B,H,S,D)."""
        names = self.options.get("grads", ("o", "lse"))
        return [t.swapaxes(1, 2) if self._turned(n) else t for n, t in zip(names, tensors, strict=True)]

    def _turned(self, name: str) -> bool:
        return self.options["layout"] == "bshd" and TENSORS[name].in_layout


Steps: TypeAlias = Generator[list[Question], list[list[Numbers]], dict[str, Numbers]]


def forward(problem: Problem, plan: ShardPlan) -> Steps:
    """Yield lists of Questions, and receive their answers. Return {"o", "lse"}, merged from the answers: o in q's dtype
    and layout, lse in float32.
    """
    questions = [_question(problem, shard, _FORWARD, {"return_lse": True}) for shard in plan.shards]
    answers = yield questions
    return _merged(problem, plan, answers)


@_QUIET
def _merged(problem: Problem, plan: ShardPlan, answers: list[list[Numbers]]) -> dict[str, Numbers]:
    q, v = problem.tensors["q"], problem.tensors["v"]
    lse = np.full(q.shape[:3], -np.inf, np.float64)
    parts = []
    for shard, (o, lse_s) in zip(plan.shards, answers, strict=True):
        at = (shard.rows.batch, slice(None), shard.queries)
        lse_s = lse_s.astype(np.float64)
        parts.append((at, o, lse_s))
        lse[at] = np.logaddexp(lse[at], lse_s)
    if "sinks" in problem.tensors:
        sinks = problem.tensors["sinks"].astype(np.float64)[:, None]
        for rows in problem.rows:
            at = (rows.batch, slice(None), slice(rows.q_start, rows.q_start + rows.band.q_len))
            lse[at] = np.logaddexp(lse[at], sinks)
    whole = np.zeros((*problem.shapes["q"][:-1], v.shape[-1]), problem.sum_dtype)
    view = problem.view(whole)
    for at, o, lse_s in parts:
        weight = np.exp(lse_s - _or_zero(lse[at])).astype(problem.sum_dtype)
        view[at] += weight[..., None] * o.astype(problem.sum_dtype)
    return {"o": whole.astype(q.dtype, copy=False), "lse": lse.astype(np.float32).reshape(problem.spec.lse_shape)}


def backward(problem: Problem, plan: ShardPlan) -> Steps:
    """Yield lists of Questions, and receive their answers. Return the gradients that the option `grads` names, summed
    over the answers, in the caller's layout.
    """
    wanted = problem.options.grads
    needs_whole = plan.merged or "sinks" in problem.tensors
    if needs_whole and problem.on_reference:
        cause = next((name for name in ("sinks", "alibi_slopes") if name in problem.tensors), "parts")
        raise invalid(cause, "the reference backend's gradients take no lse of a whole: not sharded there")
    sums: dict[str, Numbers] = {
        name: np.zeros(problem.shapes[name[1:]], np.float64 if name == "dsinks" else problem.sum_dtype)
        for name in wanted
    }
    names: tuple[str, ...] = _BACKWARD
    if "lse" not in problem.tensors and needs_whole:
        whole = yield from forward(problem, plan)
        lse = whole["lse"].reshape(problem.tensors["q"].shape[:3])
        problem = replace(problem, tensors={**problem.tensors, "o": problem.view(whole["o"]), "lse": lse})
    if "lse" in problem.tensors:
        names = (*names, "o", "lse")
    if "dsinks" in wanted:
        _add_dsinks(problem, sums["dsinks"])
    by_servers = [name for name in wanted if name != "dsinks"]
    questions = [_question(problem, shard, names, {"grads": by_servers}) for shard in plan.shards if by_servers]
    answers = yield questions
    for question, answer in zip(questions, answers, strict=True):
        for name, part in zip(by_servers, answer, strict=True):
            _add(problem, question.shard, name, part, sums[name])
    return sums


@_QUIET
def _add(problem: Problem, shard: Shard, name: str, part: Numbers, whole: Numbers) -> None:
    of_mask = TENSORS[name].broadcast
    view = whole.reshape(problem.tensors[name[1:]].shape) if of_mask else problem.view(whole)
    at = _at(problem, shard, name[1:])
    view[at] += _summed_to(part, view[at].shape)


def _question(problem: Problem, shard: Shard, names: tuple[str, ...], more: dict[str, Any]) -> Question:
    tensors = {name: problem.tensors[name][_at(problem, shard, name)] for name in names if name in problem.tensors}
    options = problem.options.model_dump(exclude=_OWN, exclude_defaults=True)
    options |= more
    # Send the axes in the order of the caller's memory: `thd` is `bshd` with B = 1.
    options["layout"] = "bhsd" if problem.options.layout == "bhsd" else "bshd"
    band, (n, m) = shard.rows.band, shard.piece.shape
    if shard.piece.offset != m - n and (min(band.left, band.right) < UNBOUNDED or "alibi_slopes" in problem.tensors):
        tensors["offset"] = np.array(shard.piece.offset)
    if "alibi_slopes" in problem.tensors:
        slopes = problem.tensors["alibi_slopes"]
        tensors["alibi_slopes"] = slopes[0] if len(slopes) == 1 else slopes[shard.rows.sequences]
    return Question(shard, tensors, options)


def _at(problem: Problem, shard: Shard, name: str) -> tuple[slice, ...]:
    """Return the index that selects the shard's part of tensor `name`, in its form of `Problem.tensors`."""
    rows, every = shard.rows, slice(None)
    if TENSORS[name].broadcast:
        of_mask = zip(problem.tensors[name].shape, (rows.batch, every, shard.queries, shard.keys), strict=True)
        return tuple(every if size == 1 else at for size, at in of_mask)
    return rows.batch, every, shard.keys if TENSORS[name].of_keys else shard.queries


@_QUIET
def _add_dsinks(problem: Problem, dsinks: Numbers) -> None:
    """Add Σ exp(sink − lse) · (dlse − do·o) to `dsinks`, over the queries that belong to a sequence."""
    t = problem.tensors
    for rows in problem.rows:
        at = (rows.batch, slice(None), slice(rows.q_start, rows.q_start + rows.band.q_len))
        do, o = (t[name][at].astype(problem.sum_dtype) for name in ("do", "o"))
        seen = -np.einsum("bhsd,bhsd->bhs", do, o, dtype=np.float64)
        if "dlse" in t:
            seen += t["dlse"][at]
        weight = np.exp(t["sinks"].astype(np.float64)[:, None] - _or_zero(t["lse"][at]))
        dsinks += (weight * seen).sum(axis=(0, 2))


def _or_zero(lse: Numbers) -> Numbers:
    """Return `lse` with 0 in place of −inf. A query that sees nothing then has weights exp(−inf − 0) = 0, not NaN."""
    return np.where(np.isneginf(lse), 0.0, lse)


def _summed_to(part: Numbers, shape: tuple[int, ...]) -> Numbers:
    """Return `part`, summed over the axes that are longer than in `shape`."""
    axes = tuple(i for i, (a, b) in enumerate(zip(part.shape, shape, strict=True)) if a != b)
    return part.sum(axis=axes, keepdims=True) if axes else part
