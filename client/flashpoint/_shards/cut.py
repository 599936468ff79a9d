"""Cut the attention of a sequence into pieces of nearly equal work. It computes with integers, not with tensors.

Query i of a sequence is at key i + offset, its diagonal. It sees the keys from i + offset − left to i + offset + right;
causal attention has right = 0. A `Piece` is a rectangle of queries and keys. Its offset counts from its own first query
and first key. The service supports two offsets: 0 (top_left) and keys − queries (bottom_right). A piece with another
offset is made computable in one of two ways:

- `Band.options` sends it with offset 0 and shifts the bounds of the window by the offset. For this, `_trimmed` first
  removes rows and columns at the edges that see nothing.
- `_straight` cuts it in two at the point where the diagonal enters it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

UNBOUNDED = 1 << 40  # larger than any length; sums of it fit into int64

Range = tuple[int, int]  # (first, end); end is not included


class Piece(NamedTuple):
    queries: Range
    keys: Range
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of queries and keys."""
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def aligned(self) -> bool:
        """Return whether the service supports its offset."""
        n, m = self.shape
        return self.offset in (0, m - n)

    @property
    def below(self) -> bool:
        """Return whether, for every query, all keys are at its diagonal or left of it."""
        return self.offset >= self.shape[1] - 1

    @property
    def above(self) -> bool:
        """Return whether, for every query, all keys are at its diagonal or right of it."""
        return self.shape[0] - 1 + self.offset <= 0

    def part(self, queries: Range, keys: Range) -> Piece:
        """Return a rectangle inside this piece. The ranges count from the piece's first row and column."""
        a, c = self.queries[0], self.keys[0]
        return Piece(
            (a + queries[0], a + queries[1]), (c + keys[0], c + keys[1]), self.offset + queries[0] - keys[0]
        )  # fmt: skip


class Band(NamedTuple):
    """One sequence: its lengths, its diagonal, and how far a query sees left and right of it, or `UNBOUNDED`."""

    q_len: int
    kv_len: int
    offset: int
    left: int
    right: int

    def pieces(self, query_parts: int, key_parts: int, *, straight: bool) -> list[Piece]:
        """Cut the queries into `query_parts`, and the keys that each part sees into `key_parts`, by equal work.

        With `straight`, every piece is aligned, or all its keys are on one side of the diagonal. Every pair of a query
        and a key that see each other is in exactly one piece.
        """
        found = []
        for queries in _equal(self._seen((0, self.q_len), (0, self.kv_len)), query_parts):
            for keys in _equal(self._seen_by(queries), key_parts):
                block = Piece(queries, keys, self.offset + queries[0] - keys[0])
                for piece in _straight(self._trimmed(block)) if straight else [block]:
                    trimmed = self._trimmed(piece)
                    if min(trimmed.shape) > 0:
                        found.append(trimmed)
        return found

    def pairs(self, piece: Piece) -> int:
        """Return the number of (query, key) pairs in a piece that see each other."""
        return int(self._seen(piece.queries, piece.keys).sum())

    def options(self, piece: Piece) -> dict[str, Any]:
        """Return the options with which the service computes the pairs of the sequence in a trimmed piece."""
        n, m = piece.shape
        # An aligned piece is sent with its own alignment, another with top_left and shifted bounds.
        shift = 0 if piece.aligned else piece.offset
        at = piece.offset - shift
        left, right = self.left - shift, self.right + shift
        options: dict[str, Any] = {"causal": right == 0, "causal_alignment": "bottom_right" if at else "top_left"}
        options["window"] = (-1 if left - at >= n - 1 else left, -1 if right + at >= m - 1 or right == 0 else right)
        return options

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


def _straight(piece: Piece) -> list[Piece]:
    """Return a piece that is aligned or on one side of the diagonal. Cut others in two where the diagonal enters."""
    n, m = piece.shape
    if piece.aligned or piece.below or piece.above:
        return [piece]
    if piece.offset > 0:
        return [piece.part((0, n), (0, piece.offset)), piece.part((0, n), (piece.offset, m))]
    return [piece.part((0, -piece.offset), (0, m)), piece.part((-piece.offset, n), (0, m))]


def _equal(counts: NDArray[np.int64], parts: int) -> Iterator[Range]:
    """Yield at most `parts` ranges with nearly equal sums of `counts`. Zeros at the first and last end are left out."""
    (some,) = counts.nonzero()
    if not some.size:
        return
    first, last = int(some[0]), int(some[-1]) + 1
    total = counts[first:last].cumsum()
    # The sum passes each equal share inside one element. Cut before or after that element, whichever is nearer.
    shares = total[-1] * np.arange(1, parts) / parts
    behind = np.searchsorted(total, shares)
    before = np.where(behind > 0, total[behind - 1], 0)
    cuts = behind + (shares - before > total[behind] - shares)
    for a, b in pairwise([0, *cuts.tolist(), last - first]):
        if a < b:
            yield first + a, first + b
