"""Cut the attention of a sequence into pieces of nearly equal work. The module uses only integers, no tensors.

The diagonal of query i of a sequence is key i + offset. Query i sees the keys from i + offset − left to
i + offset + right; causal attention has right = 0. A `Piece` is a rectangle of queries and keys. Its offset counts from
the piece's first query and first key, as the tensor `offset` of a request does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNBOUNDED = 1 << 40  # larger than any length; sums of it fit into int64

Range = tuple[int, int]  # (first, end); `end` is not included


class Piece(NamedTuple):
    queries: Range
    keys: Range
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    def part(self, queries: Range, keys: Range) -> Piece:
        """Return a rectangle inside this piece. The ranges count from the piece's first row and column."""
        a, c = self.queries[0], self.keys[0]
        return Piece(
            (a + queries[0], a + queries[1]), (c + keys[0], c + keys[1]), self.offset + queries[0] - keys[0]
        )  # fmt: skip


class Band(NamedTuple):
    """The lengths of one sequence, and the band of keys around the diagonal that its queries see."""

    q_len: int
    kv_len: int
    offset: int  # the diagonal of query i is key i + offset
    left: int  # number of keys that a query sees left of the diagonal
    right: int

    def pieces(self, query_parts: int, key_parts: int) -> list[Piece]:
        """Cut the queries into `query_parts`, and each part's visible keys into `key_parts`, with equal work."""
        pieces = []
        for queries in _equal(self._seen((0, self.q_len), (0, self.kv_len)), query_parts):
            for keys in _equal(self._seen_by(queries), key_parts):
                piece = self._trimmed(Piece(queries, keys, self.offset + queries[0] - keys[0]))
                if min(piece.shape) > 0:
                    pieces.append(piece)
        return pieces

    def pairs(self, piece: Piece | None = None) -> int:
        """Return the number of visible (query, key) pairs in a piece, or in the whole sequence."""
        queries, keys = ((0, self.q_len), (0, self.kv_len)) if piece is None else (piece.queries, piece.keys)
        return int(self._seen(queries, keys).sum())

    def _seen(self, queries: Range, keys: Range) -> NDArray[np.int64]:
        """Return, for each of `queries`, how many of `keys` it sees."""
        at = np.arange(*queries) + self.offset
        seen: NDArray[np.int64] = np.minimum(at + self.right + 1, keys[1]) - np.maximum(at - self.left, keys[0])
        return np.maximum(seen, 0)

    def _seen_by(self, queries: Range) -> NDArray[np.int64]:
        """Return, for each key, how many of `queries` see it."""
        at = np.arange(self.kv_len) - self.offset
        seen: NDArray[np.int64] = np.minimum(at + self.left + 1, queries[1]) - np.maximum(at - self.right, queries[0])
        return np.maximum(seen, 0)

    def _trimmed(self, piece: Piece) -> Piece:
        """Remove rows and columns at the edges that have no visible pair."""
        n, m = piece.shape
        piece = piece.part((min(n, max(0, -(piece.offset + self.right))), n), (0, m))
        n, m = piece.shape
        piece = piece.part((0, n), (min(m, max(0, piece.offset - self.left)), m))
        n, m = piece.shape
        piece = piece.part((0, max(0, min(n, m + self.left - piece.offset))), (0, m))
        n, m = piece.shape
        return piece.part((0, n), (0, max(0, min(m, n + piece.offset + self.right))))


def _equal(counts: NDArray[np.int64], parts: int) -> Iterator[Range]:
    """Yield at most `parts` ranges with nearly equal sums of `counts`. They omit zeros at the start and at the end."""
    (some,) = counts.nonzero()
    if not some.size:
        return
    first, last = int(some[0]), int(some[-1]) + 1
    total = counts[first:last].cumsum()
    # `shares` are the sums at which equal parts would end. The running sum passes each of them within one element: cut
    # before or after this element, where the running sum is nearer.
    shares = total[-1] * np.arange(1, parts) / parts
    behind = np.searchsorted(total, shares)
    before = np.where(behind > 0, total[behind - 1], 0)
    cuts = behind + (shares - before > total[behind] - shares)
    for a, b in pairwise([0, *cuts.tolist(), last - first]):
        if a < b:
            yield first + a, first + b
