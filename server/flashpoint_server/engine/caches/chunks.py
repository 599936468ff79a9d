"""The keys and values of one layer of a cache: chunks of 1,024 tokens, shared by forks until one of them writes.

A chunk is head-major, k (Hk, capacity, D) and v (Hk, capacity, Dv). Its edges are fixed positions of the sequence. The
last chunk of a track grows by doubling, so that short caches stay small. Nothing beyond a track's length is read, so a
chunk's memory need not be cleared before it has another owner.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flashpoint_contract.caches import CHUNK, chunk_tokens
from flashpoint_kernels.quantization import quantize, restored

HUGE = 1 << 21  # bytes of a huge page


class Chunk:
    """Memory of `capacity` tokens, held by `holders` tracks: k (1, Hk, capacity, D) and v (1, Hk, capacity, Dv).

    In 8 bits a scale for each token and head is beside them: `k_scale` and `v_scale` (1, Hk, capacity), else None.
    """

    __slots__ = ("capacity", "holders", "k", "k_scale", "nbytes", "v", "v_scale")

    def __init__(self, size: TokenSize, capacity: int) -> None:
        self.capacity = capacity
        self.holders = 1
        shapes = [(1, size.heads, capacity, dim) for dim in (size.head_dim, size.value_dim)]
        self.k, self.v = _memory(shapes, size.dtype, size.device)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if size.quantized:
            self.k_scale, self.v_scale = torch.empty(2, 1, size.heads, capacity, device=size.device).unbind(0)
        self.nbytes = size.nbytes * capacity

    def write(self, at: int, k: Tensor, v: Tensor) -> None:
        """Write k (Hk, n, D) and v (Hk, n, Dv), which are not in 8 bits, at position `at` of the chunk."""
        for t, scale, new in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if scale is not None:
                new, own = quantize(new, t.dtype)
                scale.narrow(2, at, new.shape[1]).copy_(own)
            t.narrow(2, at, new.shape[1]).copy_(new)

    def take_over(self, other: Chunk, count: int) -> None:
        """Copy the first `count` tokens of another chunk."""
        for name in ("k", "v") if self.k_scale is None else ("k", "v", "k_scale", "v_scale"):
            t, source = getattr(self, name), getattr(other, name)
            t.narrow(2, 0, count).copy_(source.narrow(2, 0, count))

    def read(self, first: int, last: int, heads: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return k (1, Hk, n, D) and v (1, Hk, n, Dv) of tokens [first, last), of some heads or of all.

        They are views; of 8 bits, new tensors in float32.
        """
        k, v = self._part(self.k, first, last, heads), self._part(self.v, first, last, heads)
        if self.k_scale is None or self.v_scale is None:
            return k, v
        scales = (self._part(scale, first, last, heads) for scale in (self.k_scale, self.v_scale))
        k, v = map(restored, (k, v), scales)
        return k, v

    def scales(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the scales (1, Hk, n) of k and of v of tokens [first, last), in 8 bits."""
        assert self.k_scale is not None
        assert self.v_scale is not None
        return self._part(self.k_scale, first, last, None), self._part(self.v_scale, first, last, None)

    def _part(self, t: Tensor, first: int, last: int, heads: slice | None) -> Tensor:
        if heads is not None:
            t = t[:, heads]
        return t.narrow(2, first, last - first) if first or last < self.capacity else t


def _memory(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return tensors of these shapes, in one piece of memory: of huge pages, where it is as large as those are.

    To attend to 4,096 keys of 8 heads, D 64, float32, takes two thirds of the time that it takes with pages of 4 KiB.
    """
    counts = [math.prod(shape) for shape in shapes]
    nbytes = sum(counts) * dtype.itemsize
    if device != "cpu" or nbytes < HUGE:
        whole = torch.empty(sum(counts), dtype=dtype, device=device)
    else:
        try:
            memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError from error
        around = torch.frombuffer(memory, dtype=torch.uint8)
        start = -around.data_ptr() % HUGE
        with suppress(OSError):  # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE * HUGE)  # no page beyond what is counted
        whole = around[start : start + nbytes].view(dtype)
    return [own.view(shape) for own, shape in zip(torch.split(whole, counts), shapes, strict=True)]


class TokenSize(NamedTuple):
    """What one token of a layer takes."""

    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str

    @property
    def quantized(self) -> bool:
        """Whether it is in 8 bits, with two scales in float32 for each head."""
        return not self.dtype.is_floating_point or self.dtype.itemsize == 1

    @property
    def nbytes(self) -> int:
        numbers = (self.head_dim + self.value_dim) * self.dtype.itemsize
        return self.heads * (numbers + (8 if self.quantized else 0))

    @property
    def read_bytes(self) -> int:
        """Bytes that take as long to attend to: 8 bits are made float32 for that."""
        return self.heads * (self.head_dim + self.value_dim) * (4 if self.quantized else self.dtype.itemsize)


class Change(NamedTuple):
    """A chunk that a write needs: its place, its capacity, and how many tokens of the one before it keeps."""

    place: int
    capacity: int
    kept: int


class TokenRun(NamedTuple):
    """Keys and values of consecutive tokens from `start` on: k (1, Hk, n, D), v (1, Hk, n, Dv), in no 8 bits."""

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
                capacity = CHUNK if self.reserved else chunk_tokens(filled)
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
        """Yield the tokens [start, stop), which it holds, as its chunks have them: of some heads, or of all."""
        for chunk, place, first, last in self._runs(start, stop):
            yield TokenRun(place + first, *chunk.read(first, last, heads))

    def scales(self, start: int, stop: int) -> Iterator[TokenRun]:
        """As `pieces`, of the scales of 8 bits: k (1, Hk, n) and v (1, Hk, n)."""
        for chunk, place, first, last in self._runs(start, stop):
            yield TokenRun(place + first, *chunk.scales(first, last))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[Chunk, int, int, int]]:
        """Yield the chunks of tokens [start, stop), where each begins, and which of its own tokens those are."""
        for place in range(start // CHUNK, -(-stop // CHUNK)):
            chunk = self.chunks[place]
            assert chunk is not None
            edge = place * CHUNK
            yield chunk, edge, max(start - edge, 0), min(stop - edge, CHUNK)

    @property
    def spares_one(self) -> bool:
        """Whether a chunk that it lets go of stays reserved for it."""
        return len(self.spares) + sum(chunk is not None for chunk in self.chunks) < self.reserved

    @property
    def nbytes(self) -> int:
        """Bytes of its chunks, shared ones in full."""
        return sum(chunk.nbytes for chunk in (*self.chunks, *self.spares) if chunk is not None)
