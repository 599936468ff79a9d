"""Where the queries, the keys and the values of a forward lie in memory: addresses and steps, in bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 1024  # keys of one softmax, see forward.c
UNBOUNDED = 1 << 60
TILE = 384  # rows of a key/value head that read the keys together: queries of its query heads
_STEP = 96  # rows: tiles have a multiple of it
SPAN = 64  # bytes of a span


class ByteSteps(NamedTuple):
    """Steps in bytes from one head to the next, and from one row to the next."""

    head: int
    row: int


NOWHERE = ByteSteps(0, 0)  # of an lse that is not wanted, or a mask that is not there


class Spans:
    """Addresses of keys: for each span, k and v of head 0, their steps from head to head, and the same of their scales.

    Each span has `tokens` keys, and each sequence `count` spans. `numbers` are 8 integers for each span, int64.
    """

    __slots__ = ("_address", "_count", "numbers", "tokens")

    def __init__(self, numbers: array[int] | NDArray[np.int64], tokens: int, count: int = 1) -> None:
        self.numbers = np.asarray(numbers)  # no copy
        self._address = self.numbers.ctypes.data
        self._count = count
        self.tokens = tokens

    def of_sequence(self, number: Any) -> Any:
        """Return the address of the first span of a sequence, or those of an array of sequences."""
        return self._address + 64 * self._count * number


class QuerySteps(NamedTuple):
    """The steps of q, o and lse."""

    q: ByteSteps
    o: ByteSteps
    lse: ByteSteps = NOWHERE


class Rows(NamedTuple):
    """The queries of one sequence and their keys.

    `q`, `o`, `lse`, `slopes`, `mask` and `blocks` are addresses (`lse`: 0 if not wanted; the others: 0 without one).
    Query i sees the keys [i + low, i + high) among [start, stop). `spans` is an address in a `Spans`, whose first key
    has position `first`. `mask` and `blocks`, the block mask, are of query 0 and key 0 of the sequence.
    """

    q: int
    o: int
    lse: int
    steps: QuerySteps
    queries: int
    start: int
    stop: int
    spans: int
    tokens: int
    first: int = 0
    low: int = -UNBOUNDED
    high: int = UNBOUNDED
    offset: int = 0
    slopes: int = 0
    sinks: int = 0
    mask: int = 0
    blocks: int = 0
    sequence: int = 0  # for dropout, and the number of the first query
    query: int = 0
    # struct reader of forward.h: addresses of a state, and of the queries of several sequences
    state: int = 0
    state_head: int = 0
    readers: int = 0
    reader_count: int = 0

    @property
    def keys(self) -> int:
        return self.stop - self.start

    @property
    def pairs(self) -> int:
        return self.queries * max(1, self.stop - self.start)

    @property
    def chunks(self) -> int:
        return max(1, -(-self.stop // CHUNK) - self.start // CHUNK)

    def tiles(self, group: int, mask_row: int) -> Iterator[Rows]:
        """Yield the queries in tiles of at most TILE rows, of which a query has `group`. Each tile reads its keys once.

        `mask_row` is the step of the mask from query to query in bytes.
        """
        count = -(-self.queries * group // TILE)
        if count < 2:
            yield self
            return
        height = max(1, -(-(self.queries * group) // (count * _STEP)) * _STEP // group)
        for first in range(0, self.queries, height):
            count, low, high = min(height, self.queries - first), self.low + first, self.high + first
            start = min(max(self.start, low), self.stop)
            yield self._replace(
                q=self.q + first * self.steps.q.row,
                o=self.o + first * self.steps.o.row,
                lse=self.lse and self.lse + first * self.steps.lse.row,
                queries=count,
                start=start,
                stop=max(start, min(self.stop, high + count - 1)),
                low=low,
                high=high,
                offset=self.offset + first,
                mask=self.mask and self.mask + first * mask_row,
                query=self.query + first,
            )
