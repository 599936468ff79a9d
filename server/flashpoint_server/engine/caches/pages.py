"""Manage the memory of caches on a GPU: one block, divided into pages, which the kernels read in place.

A page holds SMALLEST_CHUNK tokens of one layer: k (Hk, 16, D), then v (Hk, 16, Dv), and for 8-bit tokens the float32
scales of k and of v, (Hk, 16) each. A cache's chunks are runs of pages, so a call over caches names pages in a
`block_table` and copies no keys. Layers of different shapes share the block: a page of n bytes begins at a multiple of
n.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import structlog
import torch
from torch import Tensor

from flashpoint_contract.caches import SMALLEST_CHUNK
from flashpoint_server.refusal import Refusal

LEAST_BYTES = 1 << 26  # minimum bytes of a block

log = structlog.stdlib.get_logger("flashpoint.engine")


class Block:
    """`nbytes` of a device's memory, allocated in pieces. Callers must hold the ledger's lock. Raises MemoryError."""

    def __init__(self, nbytes: int, device: str) -> None:
        try:
            self.memory = torch.empty(nbytes // 16 * 16, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise MemoryError from error
        self._free = [(0, len(self.memory))]  # free pieces [start, end) in order, none of them adjacent

    @classmethod
    def largest(cls, nbytes: int, device: str) -> Block:
        """Return a block of `nbytes`. If the device lacks memory, try a half, a quarter and so on.

        Raises MemoryError if even a block of about LEAST_BYTES is too large.
        """
        wanted = nbytes
        while True:
            try:
                block = cls(nbytes, device)
            except MemoryError:
                nbytes //= 2
                if nbytes < LEAST_BYTES:
                    raise
            else:
                if nbytes < wanted:
                    log.warning("less memory for caches than asked for", device=device, bytes=nbytes, asked=wanted)
                return block

    def take(self, nbytes: int, unit: int) -> int:
        """Allocate `nbytes` from the first free piece that is large enough, at a multiple of `unit`.

        Return the offset. Raises Refusal 429.
        """
        for n, (start, end) in enumerate(self._free):
            begin = -(-start // unit) * unit
            stop = begin + nbytes
            if stop <= end:
                self._free[n : n + 1] = [piece for piece in ((start, begin), (stop, end)) if piece[0] < piece[1]]
                return begin
        raise Refusal("cache_memory", f"no free piece of the memory of caches has the {nbytes} bytes of a chunk")

    def give_back(self, start: int, nbytes: int) -> None:
        """Free the piece of `nbytes` at offset `start`, which `take` has allocated."""
        end = start + nbytes
        n = bisect_right(self._free, (start, end))
        if n and self._free[n - 1][1] == start:
            n -= 1
            start = self._free.pop(n)[0]
        if n < len(self._free) and self._free[n][0] == end:
            end = self._free.pop(n)[1]
        self._free.insert(n, (start, end))


class PagePool:
    """A view of a `Block` as pages of one shape: k (pages, Hk, 16, D) and v (pages, Hk, 16, Dv).

    If `scaled`, also `k_scale` and `v_scale` (pages, Hk, 16) in float32; otherwise these are None.
    """

    def __init__(
        self, block: Block, heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, *, scaled: bool
    ) -> None:
        rows = heads * SMALLEST_CHUNK  # number of rows in a page; a row is a key or value of one head
        k_bytes, v_bytes = (rows * dim * dtype.itemsize for dim in (head_dim, value_dim))
        scale_bytes = 4 * rows if scaled else 0
        self._block = block
        self._nbytes = k_bytes + v_bytes + 2 * scale_bytes  # bytes of a page
        count = len(block.memory) // self._nbytes

        def pages(dtype: torch.dtype, start: int, *width: int) -> Tensor:
            memory, shape = block.memory.view(dtype), (heads, SMALLEST_CHUNK, *width)
            strides = self._nbytes // dtype.itemsize, math.prod(shape[1:]), *width, 1
            return memory.as_strided((count, *shape), strides, start // dtype.itemsize)

        self.k, self.v = pages(dtype, 0, head_dim), pages(dtype, k_bytes, value_dim)
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if scaled:
            start = k_bytes + v_bytes
            self.k_scale, self.v_scale = (pages(torch.float32, start + n * scale_bytes) for n in range(2))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the pool's page tensors by the names of `attention`'s arguments."""
        every = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: t for name, t in every.items() if t is not None}

    def take(self, count: int) -> int:
        """Allocate `count` adjacent pages, and return the number of the first. Raises Refusal 429."""
        return self._block.take(count * self._nbytes, self._nbytes) // self._nbytes

    def give_back(self, first: int, count: int) -> None:
        """Free pages that `take` has allocated."""
        self._block.give_back(first * self._nbytes, count * self._nbytes)
