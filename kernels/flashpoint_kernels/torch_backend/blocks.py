"""Windows, ALiBi and diagonals, which torch's fused operators do not have: blocks of queries over their visible keys.

A block's keys are at most three runs, whose answers are merged by log-sum-exp (as in FlashAttention-2, Dao 2023):

    behind   keys before all queries of the block, away from the window's ends. There, ALiBi, −slope·(i + offset − j),
             is the sum of a number for each key (a mask of one row) and one for each query (added to lse)
    near     keys beside its queries, or all keys of a window, with a mask for the window, the diagonal and ALiBi. All
             blocks inside a sequence have the same mask: one call computes them, as if each were a sequence
    ahead    keys after all its queries, like those behind

With a mask of the caller, all keys are near. Memory in addition to the tensors is O(N). The numbers of ALiBi count from
the nearest key, so that the important ones are small and are rounded no worse than scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_kernels import bounds
from flashpoint_kernels.torch_backend.call import Call

INF = float("inf")
# Queries of a block. Narrow blocks compute and mask fewer keys outside a window; wide blocks need fewer calls. Measured
# at (1,2,2048,64) on one core with 32 to 512 queries: a window of 256 takes 6.8 ms with 64 queries and 8.7 ms with 256;
# windows of 2,049 take 35 and 28 ms, ALiBi 30 and 20 ms.
QUERIES = 256
_NARROW_QUERIES = 64
_NARROW = 512  # keys of a window
_TOGETHER = 16  # maximum blocks in one call backward, which makes gradients of keys for each of them
_FEWEST_QUERIES = 16  # of the last block: fewer are added to the block before, see reproducible.with_all_threads
_EDGE = 16  # keys: runs start at multiples, so that float32 rows of any length are whole cache lines


class Span(NamedTuple):
    """`blocks` blocks of `size` queries each, from query `first`. Keys [start, stop) are near the first block.

    Keys [behind, start) are behind it, and keys [stop, ahead) ahead of it. Either range may be empty.
    """

    first: int
    size: int
    blocks: int
    start: int
    stop: int
    behind: int
    ahead: int

    def each(self) -> Iterator[Span]:
        """Yield each block as a span."""
        for n in range(self.blocks):
            step = n * self.size
            yield self._replace(first=self.first + step, blocks=1, start=self.start + step, stop=self.stop + step)

    @property
    def rows(self) -> slice:
        """The queries of a single block."""
        return slice(self.first, self.first + self.size)


@dataclass(eq=False, slots=True)
class Blocks:
    """Sequences of equal lengths: q (n,Hq,sq,D), k and v (n,Hk,sk,D), in the operators' dtype. Answers are float32.

    Query i sees key j iff −left <= j − (i + offset) <= right.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # (n|1, Hq|1, sq|1, sk|1) float32, added
    slopes: Tensor | None  # (n|1, Hq, 1, 1) float32
    window: tuple[int, int]
    offset: int
    scale: float  # above 0
    # The mask of a block for the keys around it, of which other blocks use parts, and the position of its first key.
    _shared: tuple[int, Tensor] | None = field(default=None, init=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return o (n,Hq,sq,D) and lse (n,Hq,sq); 0 and −∞ for a query that sees no key."""
        o = self.q.new_zeros(self.q.shape, dtype=torch.float32)
        lse = o.new_full(o.shape[:-1], -INF)
        for span in self._spans(_NARROW_QUERIES if sum(self.window) <= _NARROW else QUERIES):
            if span.stop > span.start:
                bias = self._bias(span)
                for near in self._near(span):
                    answers = near.call(self, bias).forward()
                    for whole, own in zip((o, lse), answers, strict=True):
                        near.of(whole, span.first).copy_(own)
            for block in span.each():
                for far in self._far(block):
                    answer, own = far.call.forward()
                    merge(o[:, :, block.rows], lse[:, :, block.rows], answer, (own - far.shift).float())
        return o, lse

    def backward(self, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv. `lse` must be +∞ for a query that sees no key."""
        dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (self.q, self.k, self.v))
        for span in self._spans(QUERIES, _TOGETHER):  # each call adds to the gradients of its keys
            if span.stop > span.start:
                bias = self._bias(span)
                for near in self._near(span):
                    own = (near.of(t, span.first).contiguous() for t in (do, o, lse))
                    grads = near.call(self, bias).backward(*own)
                    near.of(dq, span.first).copy_(grads[0])
                    for whole, grad in ((dk, grads[1]), (dv, grads[2])):
                        near.add(whole, grad)
            for block in span.each():
                for far in self._far(block):
                    do_, o_, lse_ = (t[:, :, block.rows].contiguous() for t in (do, o, lse))
                    grads = far.call.backward(do_, o_, (lse_ + far.shift).float())
                    dq[:, :, block.rows] += grads[0]
                    dk[:, :, far.keys] += grads[1]
                    dv[:, :, far.keys] += grads[2]
        return dq, dk, dv

    def _spans(self, queries: int, most: int = 1 << 30) -> Iterator[Span]:
        """Yield spans of blocks whose near keys have the same position to them, with at most `most` blocks each."""
        (count, sk), (left, right) = (self.q.shape[2], self.k.shape[2]), self.window
        behind, ahead = (self.mask is None and self._endless(side) for side in (left, right))
        span: Span | None = None
        for first in range(0, max(count - _FEWEST_QUERIES + 1, 1), queries):
            last = first + queries - 1 if first + queries + _FEWEST_QUERIES <= count else count - 1
            lo, hi = bounds.key_range(first, last, self.offset, left, right, sk)
            if lo >= hi:
                continue
            start, stop, most_behind, most_ahead = lo - lo % _EDGE, hi, sk, 0
            if lo <= last + self.offset and first + self.offset < hi:  # else all keys are far away on one side
                if behind and lo < first + self.offset:
                    start, most_behind = first + self.offset, lo
                    start -= start % _EDGE
                if ahead and last + self.offset < hi:
                    stop, most_ahead = last + 1 + self.offset, hi
                    stop = min(stop + -stop % _EDGE, hi)
            block = Span(first, last + 1 - first, 1, start, stop, most_behind, most_ahead)
            if span is not None and self._alike(span, block) and span.blocks < most:
                span = span._replace(blocks=span.blocks + 1)
                continue
            if span is not None:
                yield span
            span = block
        if span is not None:
            yield span

    def _endless(self, side: int) -> bool:
        """Return whether this side of the window never ends inside the sequence."""
        return side >= self.q.shape[2] + self.k.shape[2]

    def _alike(self, span: Span, block: Span) -> bool:
        """Return whether a block continues a span: its keys have the same position to its queries."""
        step = span.blocks * span.size
        due = span._replace(first=span.first + step, blocks=1, start=span.start + step, stop=span.stop + step)
        return self.mask is None and block == due

    def _near(self, span: Span) -> Iterator[_Near]:
        """Yield the parts for one call each: a block of all sequences, or all blocks of one sequence."""
        return (_Near(span, None if span.blocks == 1 else n) for n in range(1 if span.blocks == 1 else len(self.q)))

    def _bias(self, span: Span) -> Tensor | None:
        """Return the mask (n|1, Hq|1, size, keys) of each block of a span for its near keys; None if it is all 0."""
        last = span.first + span.size - 1
        lo, hi = bounds.full_key_range(span.first, last, self.offset, *self.window, self.k.shape[2])
        if self.mask is None and self.slopes is None and lo <= span.start and span.stop <= hi:
            return None
        low, high = (place - span.first - self.offset for place in (span.start, span.stop))
        if self.mask is not None:
            rows = self.mask[..., span.rows, :] if self.mask.shape[2] > 1 else self.mask
            return self._band(low, high, span.size) + (rows[..., span.start : span.stop] if rows.shape[3] > 1 else rows)
        if self._shared is None:
            left, right = (min(side, self.q.shape[2] + self.k.shape[2]) for side in self.window)
            first = -_EDGE if self._endless(left) else -left - _EDGE
            stop = span.size + _FEWEST_QUERIES + _EDGE + (0 if self._endless(right) else right)
            self._shared = first, self._band(first, stop, span.size + _FEWEST_QUERIES)
        first, shared = self._shared
        if low < first or high > first + shared.shape[3] or span.size > shared.shape[2]:
            return self._band(low, high, span.size)
        return shared[:, :, : span.size, low - first : high - first]

    def _band(self, low: int, high: int, size: int) -> Tensor:
        """Return the mask of `size` queries for the keys [low, high), counted from the first query's position."""
        device, (left, right) = self.q.device, self.window
        ahead = torch.arange(low, high, device=device) - torch.arange(size, device=device)[:, None]
        hidden = ((ahead < -left) | (ahead > right))[None, None]
        bias = torch.zeros((), device=device) if self.slopes is None else ahead.abs().float() * -self.slopes
        return bias.masked_fill(hidden, -INF)

    def _far(self, block: Span) -> Iterator[_Far]:
        """Yield the calls over the far keys, before and after all queries of a block."""
        device = self.q.device
        places = torch.arange(block.first, block.first + block.size, device=device) + self.offset
        for keys, sign in ((slice(block.behind, block.start), 1), (slice(block.stop, block.ahead), -1)):
            if keys.start >= keys.stop:
                continue
            bias, shift = None, places.new_zeros((), dtype=torch.float64)
            if self.slopes is not None:
                nearest = keys.stop - 1 if sign > 0 else keys.start
                bias = (sign * (torch.arange(keys.start, keys.stop, device=device) - nearest)).float() * self.slopes
                shift = (sign * (places - nearest)) * self.slopes[..., 0].double()
            q, k, v = self.q[:, :, block.rows], self.k[:, :, keys], self.v[:, :, keys]
            yield _Far(Call(q, k, v, bias, False, self.scale), shift, keys)


class _Far(NamedTuple):
    """A call over keys on one side of a block. `shift` (n|1, Hq, queries) is ALiBi's number for each query, in float64,
    so that lse is rounded only once.
    """

    call: Call
    shift: Tensor
    keys: slice


class _Near(NamedTuple):
    """The part of a call over near keys: one block of all sequences, or all blocks of one sequence as a batch."""

    span: Span
    sequence: int | None

    def of(self, t: Tensor, first: int, length: int | None = None) -> Tensor:
        """Return a view (blocks or sequences, H, length, …) of t (n, H, S, …), from `first`, block after block."""
        length = self.span.size if length is None else length
        if self.sequence is None:
            return t[:, :, first : first + length]
        own, step = t[self.sequence, :, first:], t.stride(2)
        shape = (self.span.blocks, own.shape[0], length, *own.shape[2:])
        return own.as_strided(shape, (self.span.size * step, own.stride(0), step, *own.stride()[2:]))

    def keys(self, t: Tensor) -> Tensor:
        return self.of(t, self.span.start, self.span.stop - self.span.start)

    def call(self, own: Blocks, bias: Tensor | None) -> Call:
        if bias is not None and self.sequence is not None and bias.shape[0] > 1:
            bias = bias[self.sequence : self.sequence + 1]
        q, k, v = self.of(own.q, self.span.first), self.keys(own.k), self.keys(own.v)
        if q.is_cuda:  # blocks overlap in their keys; the CUDA operators were not tested with overlapping memory
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return Call(q, k, v, bias, False, own.scale)

    def add(self, whole: Tensor, grads: Tensor) -> None:
        """Add the gradients of near keys, in the order of blocks."""
        if self.sequence is None:
            self.keys(whole).add_(grads)
            return
        for n, grad in enumerate(grads):
            start = self.span.start + n * self.span.size
            whole[self.sequence, :, start : start + grad.shape[1]] += grad


def merge(o: Tensor, lse: Tensor, more: Tensor | None, own: Tensor) -> None:
    """Merge the answer of other keys, `more` (n,H,m,D) with log-sum-exp `own` (n,H,m), into o and lse, in place.

    None means keys with values of 0.
    """
    most = torch.maximum(lse, own)
    base = most.clamp(min=torch.finfo(torch.float32).min)  # instead of −∞ for a query that has seen no key
    held, added = (lse - base).exp_(), (own - base).exp_()
    total = held + added
    whole = total.masked_fill(total == 0, 1.0)
    o.mul_((held / whole)[..., None])
    if more is not None:
        o.addcmul_(more, (added / whole)[..., None])
    torch.add(base, total.log_(), out=lse)
