"""Store the keys and values of one layer of a cache in chunks of 1,024 tokens, which forks share until a write.

A chunk is head-major: k (1, Hk, capacity, D) and v (1, Hk, capacity, Dv), or pages on a GPU. Chunk n begins at position
1,024·n. The last chunk of a track grows by doubling, so short caches stay small. Nothing beyond a track's length is
read, so a chunk's memory is not cleared before another cache uses it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_contract.caches import CHUNK, SMALLEST_CHUNK, chunk_tokens
from flashpoint_kernels.cpu_backend.spans import KeysInPlace, Spans, spans_of
from flashpoint_kernels.quantization import quantize, restored
from flashpoint_server.engine.caches.pages import PagePool
from flashpoint_server.engine.caches.slabs import LEAST_BYTES, MOST_CHUNKS, Slab


class Chunk:
    """Memory of `capacity` tokens, used by `holders` tracks: k (1, Hk, capacity, D) and v (1, Hk, capacity, Dv).

    8-bit tokens have a scale per token and head, `k_scale` and `v_scale` (1, Hk, capacity); otherwise these are None.
    On the CPU, a chunk of 1,024 tokens with at least LEAST_BYTES is number `place` in a `slab`.
    """

    __slots__ = ("capacity", "holders", "k", "k_scale", "nbytes", "place", "slab", "v", "v_scale")

    def __init__(self, size: TokenSize, capacity: int, slab: Slab | None = None, place: int = 0) -> None:
        self.capacity = capacity
        self.holders = 1
        self.slab, self.place = slab, place
        shapes = [(1, size.heads, capacity, dim) for dim in (size.head_dim, size.value_dim)]
        counts = [math.prod(shape) for shape in shapes]
        if slab is None:
            memory = torch.empty(sum(counts), dtype=size.dtype, device=size.device)
        else:
            memory = slab.whole.narrow(0, place * slab.distance, sum(counts))
        self.k, self.v = (t.view(shape) for t, shape in zip(torch.split(memory, counts), shapes, strict=True))
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if size.quantized:
            self.k_scale, self.v_scale = torch.empty(
                2, 1, size.heads, capacity, dtype=torch.float32, device=size.device
            ).unbind(0)
        self.nbytes = size.nbytes * capacity

    def in_place(self) -> Iterator[KeysInPlace]:
        """Yield the chunk's keys and values as they are in memory: once, or once for each page."""
        for page in range(len(self.k)):
            if self.k_scale is None or self.v_scale is None:
                yield KeysInPlace(self.k[page], self.v[page])
            else:
                yield KeysInPlace(self.k[page], self.v[page], self.k_scale[page], self.v_scale[page])

    def give_back(self) -> None:
        """Return the chunk's memory to its slab, if it has one. No track may use the chunk any more."""
        if self.slab is not None:
            self.slab.give_back(self.place)

    def write(self, at: int, k: Tensor, v: Tensor) -> None:
        """Write k (Hk, n, D) and v (Hk, n, Dv), which are not 8-bit numbers, at position `at` of the chunk."""
        for t, scale, new in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if scale is not None:
                new, new_scale = quantize(new, t.dtype)
                self._put(scale, at, new_scale)
            self._put(t, at, new)

    def take_over(self, other: Chunk, count: int) -> None:
        """Copy the first `count` tokens of another chunk into this one."""
        for name in ("k", "v") if self.k_scale is None else ("k", "v", "k_scale", "v_scale"):
            self._take_over(getattr(self, name), getattr(other, name), count)

    def read(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return k (1, Hk, n, D) and v (1, Hk, n, Dv) of tokens [first, last).

        They are views; 8-bit tokens come as new tensors in float32.
        """
        k, v = self.stored(first, last)
        if self.k_scale is None or self.v_scale is None:
            return k, v
        scales = (self._part(scale, first, last) for scale in (self.k_scale, self.v_scale))
        k, v = map(restored, (k, v), scales)
        return k, v

    def keys(self, first: int, last: int) -> Tensor:
        """Return k of the tokens [first, last), as `read` does."""
        k = self._part(self.k, first, last)
        return k if self.k_scale is None else restored(k, self._part(self.k_scale, first, last))

    def stored(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the tokens [first, last) of the chunk as they are stored."""
        return self._part(self.k, first, last), self._part(self.v, first, last)

    def scales(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the scales (1, Hk, n) of k and of v for 8-bit tokens [first, last)."""
        assert self.k_scale is not None
        assert self.v_scale is not None
        return self._part(self.k_scale, first, last), self._part(self.v_scale, first, last)

    def _put(self, t: Tensor, at: int, new: Tensor) -> None:
        """Write `new` (Hk, n, …) into `t` (1, Hk, capacity, …) at position `at`."""
        t.narrow(2, at, new.shape[1]).copy_(new)

    def _take_over(self, t: Tensor, source: Tensor, count: int) -> None:
        """Copy the first `count` tokens of `source`, the same tensor of another chunk, into `t`."""
        t.narrow(2, 0, count).copy_(source.narrow(2, 0, count))

    def _part(self, t: Tensor, first: int, last: int) -> Tensor:
        return t.narrow(2, first, last - first) if first or last < self.capacity else t


class PagedChunk(Chunk):
    """A chunk of n adjacent pages: k (n, Hk, 16, D) and v (n, Hk, 16, Dv). The first page has the number `place`.

    The scales of 8-bit tokens are pages (n, Hk, 16).
    """

    __slots__ = ("_pool",)

    def __init__(self, size: TokenSize, pool: PagePool, capacity: int) -> None:
        self.capacity, self.holders, self.nbytes = capacity, 1, size.nbytes * capacity
        self.slab = self.k_scale = self.v_scale = None
        count = capacity // SMALLEST_CHUNK
        self._pool, self.place = pool, pool.take(count)
        for name, pages in pool.tensors.items():
            setattr(self, name, pages[self.place : self.place + count])

    def give_back(self) -> None:
        """Return the chunk's pages to the pool. No track may use the chunk any more."""
        self._pool.give_back(self.place, len(self.k))

    def _put(self, t: Tensor, at: int, new: Tensor) -> None:
        """Write `new` (Hk, n, …) into pages `t` (pages, Hk, 16, …) at position `at`: whole pages in one copy."""
        heads, count, *width = new.shape
        head = min(-at % SMALLEST_CHUNK, count)
        whole, rest = divmod(count - head, SMALLEST_CHUNK)
        page, row = divmod(at, SMALLEST_CHUNK)
        if head:
            t[page, :, row : row + head] = new[:, :head]
        page = -(-at // SMALLEST_CHUNK)
        if whole:
            middle = new[:, head : count - rest].reshape(heads, whole, SMALLEST_CHUNK, *width)
            t[page : page + whole].copy_(middle.transpose(0, 1))
        if rest:
            t[page + whole, :, :rest] = new[:, count - rest :]

    def _take_over(self, t: Tensor, source: Tensor, count: int) -> None:
        pages = -(-count // SMALLEST_CHUNK)
        t[:pages].copy_(source[:pages])

    def _part(self, t: Tensor, first: int, last: int) -> Tensor:
        return t.transpose(0, 1).flatten(1, 2)[None, :, first:last]


@dataclass(frozen=True)
class TokenSize:
    """The size and dtype of one token's keys and values in a layer. The layer's chunks are pages of `pool` if set."""

    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    pool: PagePool | None = None

    @cached_property
    def quantized(self) -> bool:
        """Return whether tokens are 8-bit numbers, with two float32 scales per head."""
        return not self.dtype.is_floating_point or self.dtype.itemsize == 1

    @cached_property
    def nbytes(self) -> int:
        return self.memory + (8 * self.heads if self.quantized else 0)

    @cached_property
    def memory(self) -> int:
        """Return the bytes of a token's keys and values, without scales."""
        return self.heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


class Change(NamedTuple):
    """A new chunk that a write needs: its index `place` in the track, and its capacity in tokens.

    `copied` is the number of tokens to copy into it from the chunk that it replaces.
    """

    place: int
    capacity: int
    copied: int


class TokenRun(NamedTuple):
    """Keys and values of consecutive tokens from position `start` on: k (1, Hk, n, D) and v (1, Hk, n, Dv).

    8-bit numbers are converted to float32. From `Track.scales`, k and v are the scales instead.
    """

    start: int
    k: Tensor
    v: Tensor


@dataclass(eq=False)
class Track:
    """One layer of one cache: tokens [first, length); tokens before `first` have been dropped.

    `reserved` is the number of chunks whose memory the track does not give back; `spares` are the unused ones of these.
    """

    size: TokenSize
    chunks: list[Chunk | None] = field(default_factory=list)
    spares: list[Chunk] = field(default_factory=list)
    reserved: int = 0
    length: int = 0
    first: int = 0
    # Cached results of `spans` and `numbers`.
    _spans: Spans | None = field(default=None, repr=False)
    _numbers: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def new_chunk(self, place: int, capacity: int, before: Chunk | None, more: int = 0) -> Chunk:
        """Return a new chunk for index `place`, if possible directly after `before`, the preceding chunk, in memory.

        `more` is the number of whole chunks that will follow. Raises MemoryError.
        """
        size = self.size
        if size.pool is not None:
            return PagedChunk(size, size.pool, capacity)
        if capacity < CHUNK or size.device != "cpu" or size.memory * CHUNK < LEAST_BYTES:
            return Chunk(size, capacity)
        if before is not None and before.slab is not None and before.slab.take(before.place + 1):
            return Chunk(size, capacity, before.slab, before.place + 1)
        nbytes, room = size.memory * CHUNK, max(1 + more, min(max(place, 4), MOST_CHUNKS))
        try:
            slab = Slab(nbytes, size.dtype, room)
        except MemoryError:  # memory for one chunk may be available even if the larger address space is not
            slab = Slab(nbytes, size.dtype, 1)
        slab.take(0)
        return Chunk(size, capacity, slab)

    def needs(self, at: int, count: int) -> list[Change]:
        """Return the new chunks that a write of `count` tokens at position `at` needs, in order."""
        changes = []
        for place in range(at // CHUNK, -(-(at + count) // CHUNK)) if count else ():
            start = place * CHUNK
            filled = min(CHUNK, at + count - start)
            old = self.chunks[place] if place < len(self.chunks) else None
            if old is None or old.holders > 1 or old.capacity < filled:
                capacity = CHUNK if self.reserved else chunk_tokens(filled)
                changes.append(Change(place, capacity, max(0, at - start) if old is not None else 0))
        return changes

    def write(self, at: int, k: Tensor, v: Tensor, made: list[tuple[Change, Chunk]]) -> list[Chunk]:
        """Write k (Hk, n, D) and v (Hk, n, Dv) at position `at`, and drop later tokens. Return the released chunks.

        `made` holds a chunk for each change that `needs` returned.
        """
        released: list[Chunk] = []
        if made:
            self._changed()
        for (place, _, copied), chunk in made:
            if place == len(self.chunks):
                self.chunks.append(chunk)
                continue
            old, self.chunks[place] = self.chunks[place], chunk
            if old is not None:
                if copied:
                    chunk.take_over(old, copied)
                released.append(old)
        end = at + k.shape[1]
        for place in range(at // CHUNK, -(-end // CHUNK)) if end > at else ():
            chunk_ = self.chunks[place]
            assert chunk_ is not None
            start, stop = max(at, place * CHUNK), min(end, (place + 1) * CHUNK)
            if stop - start == end - at:
                chunk_.write(start - place * CHUNK, k, v)
            else:
                part = slice(start - at, stop - at)
                chunk_.write(start - place * CHUNK, k[:, part], v[:, part])
        return released + self.cut(end)

    def cut(self, end: int) -> list[Chunk]:
        """Drop the tokens from `end` on. Return the chunks that the track released."""
        self.length = end
        remaining = -(-end // CHUNK)
        if remaining == len(self.chunks):
            return []
        self._changed()
        gone, self.chunks[remaining:] = self.chunks[remaining:], []
        return [chunk for chunk in gone if chunk is not None]

    def _changed(self) -> None:
        """Clear the cached results, because the list of chunks has changed."""
        self._spans = None
        self._numbers.clear()

    def drop_before(self, position: int) -> list[Chunk]:
        """Drop and return the chunks that are entirely before `position`."""
        gone = []
        for place in range(self.first // CHUNK, min(position, self.length) // CHUNK):
            if (chunk := self.chunks[place]) is not None:
                gone.append(chunk)
                self.chunks[place] = None
                self._changed()
            self.first = (place + 1) * CHUNK
        return gone

    def fork(self, end: int) -> Track:
        """Return a track of the tokens before `end`, which shares their chunks."""
        other = Track(self.size, self.chunks[: -(-end // CHUNK)], length=end, first=min(self.first, end))
        for chunk in other.chunks:
            if chunk is not None:
                chunk.holders += 1
        return other

    def pieces(self, start: int, stop: int) -> Iterator[TokenRun]:
        """Yield the tokens [start, stop), chunk by chunk. The track must hold them."""
        for chunk, place, first, last in self._runs(start, stop):
            yield TokenRun(place + first, *chunk.read(first, last))

    def keys(self, start: int, stop: int) -> Tensor:
        """Return k (1, Hk, n, D) of the tokens [start, stop), as `pieces` does: a view if one chunk has them."""
        every = [chunk.keys(first, last) for chunk, _, first, last in self._runs(start, stop)]
        return every[0] if len(every) == 1 else torch.cat(every, 2)

    def spans(self) -> Spans:
        """Return the places of all chunks that are not dropped, for the kernels on the CPU."""
        if self._spans is None:
            chunks = [chunk for chunk in self.chunks[self.first // CHUNK :] if chunk is not None]
            pieces = itertools.chain.from_iterable(chunk.in_place() for chunk in chunks)
            size, tokens = self.size, CHUNK if self.size.pool is None else SMALLEST_CHUNK
            self._spans = spans_of(pieces, tokens, size.dtype, size.head_dim, size.value_dim)
        return self._spans

    def numbers(self, start: int) -> Tensor:
        """Return the page numbers (int32) of the tokens from `start` on, which must be the first token of a chunk."""
        if (numbers := self._numbers.get(start)) is None:
            chunks = (chunk for chunk in self.chunks[start // CHUNK :] if chunk is not None)
            runs = [torch.arange(c.place, c.place + len(c.k), dtype=torch.int32, device="cpu") for c in chunks]
            numbers = self._numbers[start] = (
                torch.cat(runs) if runs else torch.empty(0, dtype=torch.int32, device="cpu")
            )
        return numbers[: -(-(self.length - start) // SMALLEST_CHUNK)]

    def stored(self, start: int, stop: int) -> Iterator[TokenRun]:
        """Like `pieces`, but yield 8-bit tokens as they are stored."""
        for chunk, place, first, last in self._runs(start, stop):
            yield TokenRun(place + first, *chunk.stored(first, last))

    def scales(self, start: int, stop: int) -> Iterator[TokenRun]:
        """Like `pieces`, but yield the scales of 8-bit tokens: k (1, Hk, n) and v (1, Hk, n)."""
        for chunk, place, first, last in self._runs(start, stop):
            yield TokenRun(place + first, *chunk.scales(first, last))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[Chunk, int, int, int]]:
        """Yield (chunk, position of its first token, first, last) for the tokens [start, stop), chunk by chunk.

        [first, last) is the range of these tokens inside the chunk.
        """
        for place in range(start // CHUNK, -(-stop // CHUNK)):
            chunk = self.chunks[place]
            assert chunk is not None
            edge = place * CHUNK
            yield chunk, edge, max(start - edge, 0), min(stop - edge, CHUNK)

    @property
    def spares_one(self) -> bool:
        """Whether the track has fewer chunks than it has reserved, so that it keeps the next released chunk."""
        return len(self.spares) + sum(chunk is not None for chunk in self.chunks) < self.reserved

    @property
    def nbytes(self) -> int:
        """Return the bytes of the track's chunks. Shared chunks count in full."""
        return sum(chunk.nbytes for chunk in (*self.chunks, *self.spares) if chunk is not None)
