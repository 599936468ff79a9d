"""Attention on the CPU over keys and values in chunks, read where they lie, and merged by log-sum-exp.

For sequences whose keys are in many pieces of memory: torch's fused operator runs on each chunk, on one thread, and
what it answers is weighted by its share of the softmax's denominator. Chunks that lie at equal distances are a batch of
one call: 4 of 1,024 keys of 8 heads then take no longer than 4,096 keys in one piece. No mask, window or bias: `causal`
alone, as a band whose edge the chunks are cut at, so that the operator's own diagonal does. The bits of an answer
depend on the queries, the number of keys and the chunks' edges alone: not on which chunks share a call, nor on how many
heads are computed together.

Where queries see a whole chunk, the query heads that share a key/value head are rows of one matrix: the operator then
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
_KEPT = 1 << 18  # numbers of one head's answers that wait to be merged: 4 chunks of 1,024 queries at Dv 64
_FEW = 1 << 11  # numbers of one head's answer that are summed over all chunks at once

Run = tuple[int, Tensor, Tensor]


class _Answer(NamedTuple):
    """The answer of some chunks for the queries from `first` on: o (n, heads…, rows, Dv) and lse (n, heads…, rows).

    Where all queries see all keys, heads are those of keys, and rows those of their group; else heads are (Hk, group).
    `call` is theirs, while their answers have yet to be looked at.
    """

    first: int
    o: Tensor
    lse: Tensor
    call: Call | None = None


def attend(q: Tensor, runs: Iterable[Run], scale: float, edge: int | None) -> tuple[Tensor, Tensor]:
    """Return o (Hq, sq, Dv), in float32 or in q's dtype, and lse (Hq, sq) of q (Hq, sq, D).

    `runs` are consecutive keys, one at least: the position of the first, k (n, Hk, L, D) and v (n, Hk, L, Dv) of n
    chunks that follow each other. Query i sees the keys up to i + `edge`, all where that is None. A query that sees no
    key has o = 0 and lse = −∞.
    """
    turned, scale = (1.0, scale) if scale > 0 else (-1.0, -scale) if scale else (0.0, 1.0)
    if turned != 1.0:
        q = q * turned
    (heads, queries, dim), dtype = q.shape, q.dtype
    rows, waiting = None, 0
    answers: list[_Answer] = []
    with exactly(1):
        for first, k, v, causal in _cut(runs, queries, edge):
            if rows is None:  # the query heads of each key/value head, for chunks that all queries see
                rows = aligned_heads(q.reshape(1, k.shape[1], -1, dim), dtype)
            asked = aligned_heads(q[None, :, first:], dtype) if causal else rows
            most = _KEPT // (queries * v.shape[3]) + 1  # chunks whose answers wait, so that memory is bounded
            for k_, v_ in _batches(aligned_heads(k, dtype), aligned_heads(v, dtype), most, most - waiting):
                count = k_.shape[0]
                call = Call(asked if count == 1 else asked.expand(count, -1, -1, -1), k_, v_, None, causal, scale)
                o, lse = call.unchecked_cpu()
                if edge is not None:
                    shape = count, k.shape[1], heads // k.shape[1], -1
                    o, lse = o.view(*shape, o.shape[3]), lse.view(shape)
                answers.append(_Answer(first, o, lse, call))
                if (waiting := waiting + count) == most:
                    answers, waiting = [_merged(answers)], 0
        _, o, lse, _ = _merged(answers)
        return o.reshape(heads, queries, -1), lse.reshape(heads, queries)


def _cut(runs: Iterable[Run], queries: int, edge: int | None) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
    """Yield the first query that sees some keys, these keys and values, and whether they lie on the diagonal.

    A chunk that some queries do not see comes by itself.
    """
    for start, k, v in runs:
        if edge is None:
            yield 0, k, v, False
            continue
        count, length = k.shape[0], k.shape[2]
        seen = min(max((edge + 1 - start) // length, 0), count)  # chunks that all queries see
        if seen:
            yield 0, k[:seen], v[:seen], False
        for n in range(seen, count):
            own, begin, stop = slice(n, n + 1), start + n * length, start + (n + 1) * length
            whole = max(edge + 1, begin)  # keys before it are seen by all queries
            if whole > begin:
                yield 0, k[own, :, : whole - begin], v[own, :, : whole - begin], False
            if whole < stop and (first := whole - edge) < queries:
                yield first, k[own, :, whole - begin :], v[own, :, whole - begin :], True


def _batches(k: Tensor, v: Tensor, most: int, room: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut keys and values between their chunks: `most` together, and no more than `room` of the first of them."""
    count = k.shape[0]
    if count <= room:
        yield k, v
        return
    for start in (0, *range(room, count, most)):
        stop = min(start + most, count) if start else room
        yield k[start:stop], v[start:stop]


def _merged(answers: Sequence[_Answer]) -> _Answer:
    """Return what all queries get: the answers, each with its share of the softmax's denominator.

    Sums over chunks are taken in the order of the chunks: the bits of torch's own sums depend on the tensor's size.
    """
    each, dead = _looked_at(answers)
    if each.shape[0] == 1 and not answers[0].first:
        return answers[0]._replace(call=None)
    lse = each.logcumsumexp(0)[-1]
    shares = (each - (lse.masked_fill(lse == -INF, 0.0) if dead else lse)).exp_().unsqueeze(-1)
    if lse.shape[-1] * answers[0].o.shape[-1] > _FEW or any(answer.first for answer in answers):
        return _Answer(0, _added(answers, shares)[None], lse[None])
    o = answers[0].o if len(answers) == 1 else torch.cat([answer.o for answer in answers])
    return _Answer(0, (o * shares).cumsum(0)[-1:], lse[None])


def _added(answers: Sequence[_Answer], shares: Tensor) -> Tensor:
    """Return the sum of the answers, by their shares, in place: memory is read once, at the price of a call a chunk."""
    every = iter(shares.unbind(0))
    total = shares.new_zeros(*shares.shape[1:-1], answers[0].o.shape[-1])
    for first, o, _, _ in answers:
        for own in o.unbind(0):
            total[..., first:, :].addcmul_(own, next(every)[..., first:, :])
    return total


def _looked_at(answers: Sequence[_Answer]) -> tuple[Tensor, bool]:
    """Return the lse of all chunks (chunks, heads…, rows), and whether any may be −∞.

    They are put right together with their o where they need it. A query that sees none of a chunk has −∞ there.
    """
    each, padded = _together(answers)
    if each.all():  # one operation, which takes NaN for true
        return each, padded or answers[0].call is None
    for _, o, lse, call in answers:
        if call is not None:
            shape = call.q.shape[:3]
            call.put_right(o.view(*shape, -1), lse.view(shape))
    return _together(answers)[0], True


def _together(answers: Sequence[_Answer]) -> tuple[Tensor, bool]:
    """Return the lse of all chunks, and whether a query sees none of some of them."""
    if not any(answer.first for answer in answers):
        return answers[0].lse if len(answers) == 1 else torch.cat([answer.lse for answer in answers]), False
    rows = max(answer.first + answer.lse.shape[-1] for answer in answers)
    count = sum(answer.lse.shape[0] for answer in answers)
    each = answers[0].lse.new_full((count, *answers[0].lse.shape[1:-1], rows), -INF)
    place = 0
    for answer in answers:
        each[place : (place := place + answer.lse.shape[0]), ..., answer.first :] = answer.lse
    return each, True
