"""Attention on the CPU over keys and values in several chunks of memory, without copying them into one.

torch's fused operator runs on each chunk on one thread. The answers are merged by their shares of the softmax's
denominator (log-sum-exp). Chunks at equal distances in memory form the batch of one call: 4 chunks of 1,024 keys of 8
heads then take no longer than 4,096 keys in one piece. Masks, windows and biases are not supported, only `causal`:
chunks are cut at the edge of the diagonal band, so that the operator's own diagonal is sufficient. The bits of an
answer depend only on the queries, the number of keys and the edges of the chunks. They do not depend on which chunks
share a call, or on how many heads are computed together.

If all queries see a whole chunk, the query heads that share a key/value head become rows of one matrix. Then the
operator reads each key once, not once for each query head (5 times as fast at 32 query heads on 8, D 128, one query).
It reads float16 and bfloat16 directly: converting them to float32 first takes three times as long (8 heads, D 64, one
query).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_kernels.reproducible import aligned_heads, exactly
from flashpoint_kernels.torch_backend.call import Call

INF = float("inf")
_KEPT = 1 << 18  # maximum numbers of one head's answers before they are merged: 4 chunks of 1,024 queries at Dv 64
_FEW = 1 << 11  # up to this many numbers of one head's answer, all chunks are summed at once

Run = tuple[int, Tensor, Tensor]


class _Answer(NamedTuple):
    """The answer of some chunks for the queries from `first`: o (n, heads…, rows, Dv) and lse (n, heads…, rows).

    If all queries see all keys, heads are key/value heads, and rows include the query heads of their group; else heads
    are (Hk, group). `call` is set until the answers have been checked.
    """

    first: int
    o: Tensor
    lse: Tensor
    call: Call | None = None


def attend(q: Tensor, runs: Iterable[Run], scale: float, edge: int | None) -> tuple[Tensor, Tensor]:
    """Return o (Hq, sq, Dv), in float32 or in q's dtype, and lse (Hq, sq) of q (Hq, sq, D).

    `runs` are consecutive keys, at least one run: the position of the first key, and k (n, Hk, L, D) and v (n, Hk, L,
    Dv) of n successive chunks. Query i sees the keys up to i + `edge`; None means all. A query that sees no key has o =
    0 and lse = −∞.
    """
    turned, scale = (1.0, scale) if scale > 0 else (-1.0, -scale) if scale else (0.0, 1.0)
    if turned != 1.0:
        q = q * turned
    (heads, queries, dim), dtype = q.shape, q.dtype
    rows, waiting = None, 0
    answers: list[_Answer] = []
    with exactly(1):
        for first, k, v, causal in _cut(runs, queries, edge):
            if rows is None:  # query heads grouped by key/value head, for chunks that all queries see
                rows = aligned_heads(q.reshape(1, k.shape[1], -1, dim), dtype)
            asked = aligned_heads(q[None, :, first:], dtype) if causal else rows
            most = _KEPT // (queries * v.shape[3]) + 1  # maximum chunks with unmerged answers: bounds the memory
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

    A chunk that some queries do not see is cut, and is yielded separately.
    """
    for start, k, v in runs:
        if edge is None:
            yield 0, k, v, False
            continue
        count, length = k.shape[0], k.shape[2]
        seen = min(max((edge + 1 - start) // length, 0), count)  # number of chunks that all queries see
        if seen:
            yield 0, k[:seen], v[:seen], False
        for n in range(seen, count):
            own, begin, stop = slice(n, n + 1), start + n * length, start + (n + 1) * length
            whole = max(edge + 1, begin)  # all queries see the keys before this one
            if whole > begin:
                yield 0, k[own, :, : whole - begin], v[own, :, : whole - begin], False
            if whole < stop and (first := whole - edge) < queries:
                yield first, k[own, :, whole - begin :], v[own, :, whole - begin :], True


def _batches(k: Tensor, v: Tensor, most: int, room: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split keys and values between chunks into batches of `most`; the first batch has at most `room` chunks."""
    count = k.shape[0]
    if count <= room:
        yield k, v
        return
    for start in (0, *range(room, count, most)):
        stop = min(start + most, count) if start else room
        yield k[start:stop], v[start:stop]


def _merged(answers: Sequence[_Answer]) -> _Answer:
    """Merge answers, each by its share of the softmax's denominator.

    Sums over chunks run in the order of the chunks: the bits of torch's own sums depend on the tensor's size.
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
    """Return the sum of the answers, weighted by their shares, in place.

    It reads memory once, with one call for each chunk.
    """
    every = iter(shares.unbind(0))
    total = shares.new_zeros(*shares.shape[1:-1], answers[0].o.shape[-1])
    for first, o, _, _ in answers:
        for own in o.unbind(0):
            total[..., first:, :].addcmul_(own, next(every)[..., first:, :])
    return total


def _looked_at(answers: Sequence[_Answer]) -> tuple[Tensor, bool]:
    """Return the lse of all chunks (chunks, heads…, rows), and whether any may be −∞.

    Answers that need it are corrected in place, lse and o. A query that sees no key of a chunk has −∞ there.
    """
    each, padded = _together(answers)
    if each.all():  # a single operation, for which NaN is true
        return each, padded or answers[0].call is None
    for _, o, lse, call in answers:
        if call is not None:
            shape = call.q.shape[:3]
            call.put_right(o.view(*shape, -1), lse.view(shape))
    return _together(answers)[0], True


def _together(answers: Sequence[_Answer]) -> tuple[Tensor, bool]:
    """Return the lse of all chunks, and whether some query sees no key of some chunk."""
    if not any(answer.first for answer in answers):
        return answers[0].lse if len(answers) == 1 else torch.cat([answer.lse for answer in answers]), False
    rows = max(answer.first + answer.lse.shape[-1] for answer in answers)
    count = sum(answer.lse.shape[0] for answer in answers)
    each = answers[0].lse.new_full((count, *answers[0].lse.shape[1:-1], rows), -INF)
    place = 0
    for answer in answers:
        each[place : (place := place + answer.lse.shape[0]), ..., answer.first :] = answer.lse
    return each, True
