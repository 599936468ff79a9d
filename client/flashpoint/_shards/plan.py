"""Plan the shards of a problem: the number of parts of its queries and keys, and the rows of each shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashpoint._shards.cut import Band, Piece
from flashpoint._shards.problem import Problem, Rows
from flashpoint.errors import invalid

# Find the cut whose largest piece is smallest. Among the cuts whose largest piece is at most UNEVEN times that size,
# choose the one that sends the fewest bytes.
UNEVEN = 1.2
MOST_PARTS = 1 << 16


@dataclass(frozen=True)
class Shard:
    """One piece, as slices of the problem's tensors. `pairs` counts (query, key) pairs over all heads and sequences."""

    rows: Rows
    piece: Piece
    pairs: int
    queries: slice
    keys: slice


@dataclass(frozen=True)
class ShardPlan:
    """The shards in the order in which they are merged. `merged`: some query is in several shards."""

    shards: tuple[Shard, ...]
    merged: bool


def plan(problem: Problem, servers: int, parts: tuple[int, int] | None) -> ShardPlan:
    """Cut a problem into one part for each server, or each sequence into `parts` (query parts, key parts)."""
    if parts is not None and not (isinstance(parts, (tuple, list)) and len(parts) == 2 and all(map(_count, parts))):
        raise invalid("parts", f"must be two integers from 1 to {MOST_PARTS}: parts of the queries, and of the keys")
    heads = problem.tensors["q"].shape[1], problem.tensors["k"].shape[1]
    works = [rows.band.pairs() for rows in problem.rows]
    shards: list[Shard] = []
    merged = False
    for rows, work in zip(problem.rows, works, strict=True):
        # A sequence gets servers in proportion to its work, so a short one among long ones is not cut.
        share = max(1, round(servers * work / max(1, sum(works))))
        ways = [parts] if parts is not None else list(_ways(share, whole_keys=problem.on_reference))
        pieces = _best(rows.band, ways, heads)
        shards += (_shard(rows, piece, heads[0]) for piece in pieces)
        merged |= any(a[1] > b[0] for a, b in pairwise(sorted(piece.queries for piece in pieces)))
    return ShardPlan(tuple(shards), merged)


def _count(part: object) -> bool:
    return type(part) is int and 1 <= part <= MOST_PARTS


def _ways(parts: int, *, whole_keys: bool) -> Iterator[tuple[int, int]]:
    """Yield (query parts, key parts) with the product `parts`, in increasing order of key parts, which need merging."""
    for keys in range(1, parts + 1):
        if parts % keys == 0 and (keys == 1 or not whole_keys):
            yield parts // keys, keys


def _best(band: Band, ways: Sequence[tuple[int, int]], heads: tuple[int, int]) -> list[Piece]:
    cut = [band.pieces(*way) for way in ways]
    longest = [max((band.pairs(piece) for piece in pieces), default=0) for pieces in cut]

    def sent(pieces: list[Piece]) -> int:
        return sum(n * heads[0] + m * heads[1] for n, m in (piece.shape for piece in pieces))

    even = [pieces for pieces, largest in zip(cut, longest, strict=True) if largest <= UNEVEN * min(longest)]
    return min(even, key=sent)


def _shard(rows: Rows, piece: Piece, q_heads: int) -> Shard:
    def moved(start: int, part: tuple[int, int]) -> slice:
        return slice(start + part[0], start + part[1])

    pairs = rows.band.pairs(piece) * q_heads * (rows.batch.stop - rows.batch.start)
    return Shard(rows, piece, pairs, moved(rows.q_start, piece.queries), moved(rows.kv_start, piece.keys))
