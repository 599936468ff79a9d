"""Attention on the CPU over keys and values in chunks, read where they lie, and merged by log-sum-exp.

For sequences whose keys are in many pieces of memory: torch's fused operator runs on each piece, on one thread, and
what it answers is weighted by its share of the softmax's denominator. No mask, window or bias: `causal` alone, as a
band whose edge the pieces are cut at, so that the operator's own diagonal does. The bits of an answer depend on the
queries, the number of keys and the pieces' places alone: not on how many heads are computed together.

Where queries see a whole piece, the query heads that share a key/value head are rows of one matrix: the operator then
reads each key once, not once for each query head (5 times as fast at 32 query heads on 8, D 128, one query). It reads
float16 and bfloat16 as they are: to make float32 of them first takes three times as long (8 heads, D 64, one query).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_kernels.reproducible import aligned_heads, exactly
from flashpoint_kernels.torch_backend.call import Call

INF = float("inf")
_KEPT = 1 << 18  # numbers of one head's answers that wait to be merged: 4 pieces of 1,024 queries at Dv 64

Piece = tuple[int, Tensor, Tensor]


class _Answer(NamedTuple):
    """What the queries from the `first` on get of some keys: o (Hk, group, n, Dv) and lse (Hk, group, n).

    `call` is that of one piece, whose answer has yet to be looked at.
    """

    first: int
    o: Tensor
    lse: Tensor
    call: Call | None = None


def attend(q: Tensor, pieces: Iterable[Piece], scale: float, edge: int | None) -> tuple[Tensor, Tensor]:
    """Return o (Hq, sq, Dv), in float32 or in q's dtype, and lse (Hq, sq) of q (Hq, sq, D).

    `pieces` are consecutive keys, one at least: the position of the first, k (1, Hk, n, D) and v (1, Hk, n, Dv). Query
    i sees the keys up to i + `edge`, all where that is None. A query that sees no key has o = 0 and lse = −∞.
    """
    turned, scale = (1.0, scale) if scale > 0 else (-1.0, -scale) if scale else (0.0, 1.0)
    if turned != 1.0:
        q = q * turned
    (heads, queries, dim), dtype = q.shape, q.dtype
    rows, group, kept = None, 1, 0
    answers: list[_Answer] = []
    with torch.no_grad(), exactly(1):
        for first, k, v, causal in _cut(pieces, queries, edge):
            kv_heads = k.shape[1]
            if rows is None:  # the query heads of each key/value head, for pieces that all queries see
                rows = aligned_heads(q.reshape(1, kv_heads, -1, dim), dtype)
                group = 1 if edge is None else heads // kv_heads
            asked = aligned_heads(q[None, :, first:], dtype) if causal else rows
            call = Call(asked, aligned_heads(k, dtype), aligned_heads(v, dtype), None, causal, scale)
            o, lse = call.unchecked_cpu()
            shape = kv_heads, group, -1
            answers.append(_Answer(first, o.view(*shape, o.shape[3]), lse.view(shape), call))
            if (kept := kept + queries * o.shape[3]) > _KEPT:
                answers, kept = [_merged(answers)], 0
        _, o, lse, _ = _merged(answers)
        return o.reshape(heads, queries, -1), lse.reshape(heads, queries)


def _cut(pieces: Iterable[Piece], queries: int, edge: int | None) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
    """Yield the first query that sees a piece, its keys and values, and whether they lie on the diagonal."""
    for start, k, v in pieces:
        if edge is None or edge + 1 >= (stop := start + k.shape[2]):
            yield 0, k, v, False
            continue
        whole = max(edge + 1, start)  # keys before it are seen by all queries
        if whole > start:
            yield 0, k[:, :, : whole - start], v[:, :, : whole - start], False
        if whole < stop and (first := whole - edge) < queries:
            yield first, k[:, :, whole - start :], v[:, :, whole - start :], True


def _merged(answers: Sequence[_Answer]) -> _Answer:
    """Return what all queries get: the answers, each with its share of the softmax's denominator."""
    each = _looked_at(answers)
    if len(answers) == 1 and not answers[0].first:
        return answers[0]._replace(call=None)
    lse, *others = each.unbind(0)
    for other in others:
        lse = torch.logaddexp(lse, other)
    shares = (each - lse.masked_fill(lse == -INF, 0.0)).exp_().unsqueeze(-1)
    o = shares.new_zeros(*lse.shape, answers[0].o.shape[-1])
    for (first, own, _, _), share in zip(answers, shares.unbind(0), strict=True):
        if first:
            o[:, :, first:].addcmul_(own, share[:, :, first:])
        else:
            o.addcmul_(own, share)
    return _Answer(0, o, lse)


def _looked_at(answers: Sequence[_Answer]) -> Tensor:
    """Return the lse of all answers (pieces, Hk, group, queries), put right together with their o where they need it.

    A query that sees none of a piece has −∞ there.
    """
    each = _together(answers)
    if each.all():  # one operation, which takes NaN for true
        return each
    for _, o, lse, call in answers:
        if call is not None:
            shape = call.q.shape[:3]
            call.put_right(o.view(*shape, -1), lse.view(shape))
    return _together(answers)


def _together(answers: Sequence[_Answer]) -> Tensor:
    if not any(answer.first for answer in answers):
        return torch.stack([answer.lse for answer in answers])
    queries = max(answer.first + answer.lse.shape[2] for answer in answers)
    each = answers[0].lse.new_full((len(answers), *answers[0].lse.shape[:2], queries), -INF)
    for place, answer in zip(each, answers, strict=True):
        place[:, :, answer.first :] = answer.lse
    return each
