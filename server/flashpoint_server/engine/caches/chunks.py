"""The keys and values of one layer of a cache: chunks of 1,024 tokens, shared by forks until one of them writes.

A chunk is head-major, k (Hk, capacity, D) and v (Hk, capacity, Dv). Its edges are fixed positions of the sequence. The
last chunk of a track grows by doubling, so that short caches stay small. What is written is never read beyond a track's
length, so that the memory of a chunk need not be cleared before it has another owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1024  # tokens; measured beside 256 and 512: docs/decisions
SMALLEST = 16  # tokens: rows of one head are then whole cache lines, so that every head is aligned


class Chunk:
    """Memory of `capacity` tokens, held by `holders` tracks: k (1, Hk, capacity, D) and v (1, Hk, capacity, Dv)."""

    __slots__ = ("capacity", "holders", "k", "nbytes", "v")

    def __init__(self, size: TokenSize, capacity: int) -> None:
        self.capacity = capacity
        self.holders = 1
        self.k = torch.empty(1, size.heads, capacity, size.head_dim, dtype=size.dtype, device=size.device)
        self.v = torch.empty(1, size.heads, capacity, size.value_dim, dtype=size.dtype, device=size.device)
        self.nbytes = size.nbytes * capacity

    def write(self, at: int, k: Tensor, v: Tensor) -> None:
        """Write k (Hk, n, D) and v (Hk, n, Dv) at position `at` of the chunk."""
        self.k.narrow(2, at, k.shape[1]).copy_(k)
        self.v.narrow(2, at, v.shape[1]).copy_(v)

    def take_over(self, other: Chunk, count: int) -> None:
        """Copy the first `count` tokens of another chunk."""
        self.k.narrow(2, 0, count).copy_(other.k.narrow(2, 0, count))
        self.v.narrow(2, 0, count).copy_(other.v.narrow(2, 0, count))

    def read(self, first: int, last: int, heads: slice | None) -> tuple[Tensor, Tensor]:
        """Return k (1, Hk, n, D) and v (1, Hk, n, Dv) of tokens [first, last), of some heads or of all."""
        k, v = self.k, self.v
        if heads is not None:
            k, v = k[:, heads], v[:, heads]
        if first or last < self.capacity:
            k, v = k.narrow(2, first, last - first), v.narrow(2, first, last - first)
        return k, v


class TokenSize(NamedTuple):
    """What one token of a layer takes."""

    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str

    @property
    def nbytes(self) -> int:
        return self.heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


class Change(NamedTuple):
    """A chunk that a write needs: its place, its capacity, and how many tokens of the one before it keeps."""

    place: int
    capacity: int
    kept: int


class TokenRun(NamedTuple):
    """Keys and values of consecutive tokens from `start` on: k (1, Hk, n, D), v (1, Hk, n, Dv)."""

    start: int
    k: Tensor
    v: Tensor


@dataclass(eq=False)
class Track:
    """One layer of one cache: tokens [first, length), where those before `first` have been dropped.

    `reserved` is how many chunks it keeps for itself, of which `spares` are not used.
    """

    size: TokenSize
    chunks: list[Chunk | None] = field(default_factory=list)
    spares: list[Chunk] = field(default_factory=list)
    reserved: int = 0
    length: int = 0
    first: int = 0

    def needs(self, at: int, count: int) -> list[Change]:
        """Return the chunks that a write of `count` tokens at position `at` needs, in order."""
        changes = []
        for place in range(at // CHUNK, -(-(at + count) // CHUNK)) if count else ():
            start = place * CHUNK
            filled = min(CHUNK, at + count - start)
            old = self.chunks[place] if place < len(self.chunks) else None
            if old is None or old.holders > 1 or old.capacity < filled:
                capacity = CHUNK if self.reserved else max(SMALLEST, 1 << (filled - 1).bit_length())
                changes.append(Change(place, capacity, max(0, at - start) if old is not None else 0))
        return changes

    def write(self, at: int, k: Tensor, v: Tensor, made: list[tuple[Change, Chunk]]) -> list[Chunk]:
        """Write k (Hk, n, D) and v (Hk, n, Dv) at position `at`, later tokens being dropped; `made` as `needs` said.

        Return the chunks that the track has let go of.
        """
        released: list[Chunk] = []
        for (place, _, kept), chunk in made:
            if place == len(self.chunks):
                self.chunks.append(chunk)
                continue
            old, self.chunks[place] = self.chunks[place], chunk
            if old is not None:
                if kept:
                    chunk.take_over(old, kept)
                released.append(old)
        end = at + k.shape[1]
        for place in range(at // CHUNK, -(-end // CHUNK)) if end > at else ():
            chunk_ = self.chunks[place]
            assert chunk_ is not None
            start, stop = max(at, place * CHUNK), min(end, (place + 1) * CHUNK)
            if stop - start == end - at:
                chunk_.write(start - place * CHUNK, k, v)
            else:
                own = slice(start - at, stop - at)
                chunk_.write(start - place * CHUNK, k[:, own], v[:, own])
        return released + self.cut(end)

    def cut(self, end: int) -> list[Chunk]:
        """Drop the tokens from `end` on. Return the chunks that the track has let go of."""
        self.length = end
        kept = -(-end // CHUNK)
        gone, self.chunks[kept:] = self.chunks[kept:], []
        return [chunk for chunk in gone if chunk is not None]

    def drop_before(self, position: int) -> list[Chunk]:
        """Drop the chunks that lie before `position` altogether. Return them."""
        gone = []
        for place in range(self.first // CHUNK, min(position, self.length) // CHUNK):
            if (chunk := self.chunks[place]) is not None:
                gone.append(chunk)
                self.chunks[place] = None
            self.first = (place + 1) * CHUNK
        return gone

    def fork(self, end: int) -> Track:
        """Return a track of the tokens before `end`, which shares their chunks."""
        other = Track(self.size, self.chunks[: -(-end // CHUNK)], length=end, first=min(self.first, end))
        for chunk in other.chunks:
            if chunk is not None:
                chunk.holders += 1
        return other

    def pieces(self, start: int, stop: int, heads: slice | None = None) -> Iterator[TokenRun]:
        """Yield the tokens [start, stop), which it holds, as views of its chunks: of some heads, or of all."""
        for place in range(start // CHUNK, -(-stop // CHUNK)):
            chunk = self.chunks[place]
            assert chunk is not None
            edge = place * CHUNK
            first = max(start, edge)
            yield TokenRun(first, *chunk.read(first - edge, min(stop - edge, CHUNK), heads))

    @property
    def spares_one(self) -> bool:
        """Whether a chunk that it lets go of stays reserved for it."""
        return len(self.spares) + sum(chunk is not None for chunk in self.chunks) < self.reserved

    @property
    def nbytes(self) -> int:
        """Bytes of its chunks, shared ones in full."""
        return sum(chunk.nbytes for chunk in (*self.chunks, *self.spares) if chunk is not None)
