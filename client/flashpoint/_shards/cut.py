"""Where the attention of a sequence is cut into pieces of equal work that servers compute alone. Integers, no tensors.

Query i of a sequence stands at key i + offset and sees the keys from i + offset − left to i + offset + right; causality
is right = 0. A `Piece` is a rectangle of queries and keys with an offset of its own, in which its first query and its
first key are 0. The service knows two offsets, 0 (top_left) and keys − queries (bottom_right). Where neither is right,
a window between two other bounds says the same (`Band.options`), once no row and no column of the piece is left that
sees nothing (`_trimmed`); or the piece is cut again where the diagonal leaves it (`_straight`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

UNBOUNDED = 1 << 40  # beyond any length, and its sums within int64

Range = tuple[int, int]  # the first, and the one behind the last


class Piece(NamedTuple):
    queries: Range
    keys: Range
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def aligned(self) -> bool:
        """Whether its offset is one that the service knows."""
        n, m = self.shape
        return self.offset in (0, m - n)

    @property
    def below(self) -> bool:
        """Whether every key is at its query's diagonal, or left of it."""
        return self.offset >= self.shape[1] - 1

    @property
    def above(self) -> bool:
        """Whether every key is at its query's diagonal, or right of it."""
        return self.shape[0] - 1 + self.offset <= 0

    def part(self, queries: Range, keys: Range) -> Piece:
        """A rectangle in it, given by its own rows and columns."""
        a, c = self.queries[0], self.keys[0]
        return Piece(
            (a + queries[0], a + queries[1]), (c + keys[0], c + keys[1]), self.offset + queries[0] - keys[0]
        )  # fmt: skip


class Band(NamedTuple):
    """One sequence: its lengths, its diagonal, and the bounds of what is seen beside it, `UNBOUNDED` for none."""

    q_len: int
    kv_len: int
    offset: int
    left: int
    right: int

    def pieces(self, query_parts: int, key_parts: int, *, straight: bool) -> list[Piece]:
        """The queries in parts that see equally many keys, and what each sees in parts of equally many pairs.

        With `straight`, every piece is aligned, or its keys are all on one side of the diagonal. Nothing that is seen
        is left out, and nothing is in two pieces.
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
        """How many keys the queries of a piece see in it, all together."""
        return int(self._seen(piece.queries, piece.keys).sum())

    def options(self, piece: Piece) -> dict[str, Any]:
        """The options by which the service sees in a trimmed piece what the sequence does."""
        n, m = piece.shape
        # Sent with its own alignment where it has one, else with top_left and bounds that are shifted.
        shift = 0 if piece.aligned else piece.offset
        at = piece.offset - shift
        left, right = self.left - shift, self.right + shift
        options: dict[str, Any] = {"causal": right == 0, "causal_alignment": "bottom_right" if at else "top_left"}
        options["window"] = (-1 if left - at >= n - 1 else left, -1 if right + at >= m - 1 or right == 0 else right)
        return options

    def _seen(self, queries: Range, keys: Range) -> NDArray[np.int64]:
        """How many of `keys` each of `queries` sees."""
        at = np.arange(*queries) + self.offset
        seen: NDArray[np.int64] = np.minimum(at + self.right + 1, keys[1]) - np.maximum(at - self.left, keys[0])
        return np.maximum(seen, 0)

    def _seen_by(self, queries: Range) -> NDArray[np.int64]:
        """How many of `queries` see each key."""
        at = np.arange(self.kv_len) - self.offset
        seen: NDArray[np.int64] = np.minimum(at + self.left + 1, queries[1]) - np.maximum(at - self.right, queries[0])
        return np.maximum(seen, 0)

    def _trimmed(self, piece: Piece) -> Piece:
        """Without the rows and columns at its edges in which nothing is seen."""
        n, m = piece.shape
        piece = piece.part((min(n, max(0, -(piece.offset + self.right))), n), (0, m))
        n, m = piece.shape
        piece = piece.part((0, n), (min(m, max(0, piece.offset - self.left)), m))
        n, m = piece.shape
        piece = piece.part((0, max(0, min(n, m + self.left - piece.offset))), (0, m))
        n, m = piece.shape
        return piece.part((0, n), (0, max(0, min(m, n + piece.offset + self.right))))


def _straight(piece: Piece) -> list[Piece]:
    """A piece that is aligned or on one side of the diagonal; else cut in two where the diagonal enters it."""
    n, m = piece.shape
    if piece.aligned or piece.below or piece.above:
        return [piece]
    if piece.offset > 0:
        return [piece.part((0, n), (0, piece.offset)), piece.part((0, n), (piece.offset, m))]
    return [piece.part((0, -piece.offset), (0, m)), piece.part((-piece.offset, n), (0, m))]


def _equal(counts: NDArray[np.int64], parts: int) -> Iterator[Range]:
    """At most `parts` ranges whose counts add up to nearly the same; without zeros at their ends, none if all are 0."""
    (some,) = counts.nonzero()
    if not some.size:
        return
    first, last = int(some[0]), int(some[-1]) + 1
    total = counts[first:last].cumsum()
    # The cut that is nearest to each equal share: one before or one behind where the sum passes it.
    shares = total[-1] * np.arange(1, parts) / parts
    behind = np.searchsorted(total, shares)
    before = np.where(behind > 0, total[behind - 1], 0)
    cuts = behind + (shares - before > total[behind] - shares)
    for a, b in pairwise([0, *cuts.tolist(), last - first]):
        if a < b:
            yield first + a, first + b
