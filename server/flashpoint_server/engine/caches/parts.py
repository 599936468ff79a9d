"""Attention over caches on the CPU: parts that cores compute in parallel, in the caches' own memory.

The kernels in C (flashpoint_kernels.native) read the chunks where they lie, 8-bit ones, too. Many queries are cut into
tiles, which read the keys again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.cost import NOMINAL, row_seconds
from flashpoint_kernels.native import Decode, Rows, Spans
from flashpoint_kernels.reproducible import PART_SECONDS
from flashpoint_kernels.torch_backend.few import rows_of

TILE = 64  # rows of a key/value head, which are queries of its query heads: they fit a core's cache

# Bytes of keys and values. A smaller part takes less time than a part costs; a larger one uses a core for milliseconds.
LEAST_BYTES, MOST_BYTES = 1 << 21, 1 << 26


@dataclass(frozen=True, eq=False, slots=True)
class CachedPart:
    """One core's part of a call: units [first, last) of `decode`, which are key/value heads of tiles of queries.

    `rows` are the sequences that begin in this part.
    """

    decode: Decode
    first: int
    last: int
    rows: Sequence[Row]

    @property
    def seed(self) -> None:
        return None

    @property
    def first_head(self) -> int:
        """Return 0, because `rows` never contains a sequence twice."""
        return 0

    def compute(self) -> None:
        """Write o and lse."""
        self.decode.compute(self.first, self.last)


def tiles(
    spec: Spec, row: Row, place: Mapping[str, int], decode: Decode, spans: Spans, first: int, start: int, slopes: int
) -> list[Rows]:
    """Return the queries of a sequence in tiles.

    `place` are the addresses of its q, o and lse, and `slopes` that of its slopes, or 0. Its keys begin at `first`;
    those before `start` are not seen.
    """
    addresses = place["q"], place["o"], place.get("lse", 0)
    whole = rows_of(spec, row, *addresses, spans.of_sequence(0), spans.tokens, slopes, first, start)
    height = max(1, TILE // decode.group)
    if row.q_len <= height:
        return [whole]
    return [whole.of_queries(n, min(height, row.q_len - n), decode) for n in range(0, row.q_len, height)]


def cut(spec: Spec, decode: Decode, every: Sequence[Row], cores: int) -> list[CachedPart]:
    """Cut a call into parts of about equal work, between tiles of queries and between key/value heads.

    There are enough parts for `cores` cores. The cut does not change the bits.
    """
    rows = [row for row in every if row.q_len]
    if decode.units < 2:
        return [CachedPart(decode, 0, decode.units, rows)]
    total, seconds = decode.nbytes, 0.0
    if spec.q_len > 1 or spec.q_heads > spec.kv_heads:  # otherwise most of the time is for reading keys
        seconds = sum(row_seconds(spec, NOMINAL["torch"], row) for row in rows)
    wanted = max(min(cores, total // LEAST_BYTES), total // MOST_BYTES, int(seconds / PART_SECONDS), 1)
    count = min(wanted, decode.units)
    edges = [n * decode.units // count for n in range(count + 1)]
    return [CachedPart(decode, start, stop, () if start else rows) for start, stop in pairwise(edges)]
