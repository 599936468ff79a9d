"""Describe where tensors, and the queries and keys of a forward, are in memory: addresses, and strides in bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint_contract.spec import Row

CHUNK = 1024  # keys of one softmax, see forward.c
UNBOUNDED = 1 << 60
TILE = 384  # maximum rows of a tile: the queries of all query heads that share a key/value head
_STEP = 96  # sequences are cut into tiles after about a multiple of this number of rows
SPAN = 64  # bytes of one span in `Spans.numbers`


class ByteSteps(NamedTuple):
    """Strides in bytes from one head to the next, and from one row to the next."""

    head: int
    row: int


NOWHERE = ByteSteps(0, 0)  # strides of an absent lse or mask


class Place(NamedTuple):
    """The address of a tensor (N, H, S, …), and its strides in bytes; all are 0 if the tensor is absent."""

    address: int = 0
    batch: int = 0
    steps: ByteSteps = NOWHERE

    @classmethod
    def of(cls, t: Tensor | None) -> Place:
        if t is None:
            return ABSENT
        batch, head, row, *_ = t.stride()
        size = t.itemsize
        return cls(t.data_ptr(), batch * size, ByteSteps(head * size, row * size))

    def at(self, batch: Any, row: Any, head: int = 0) -> Any:
        """Return the address of a row in a head; 0 if the tensor is absent.

        If `batch` and `row` are arrays, with one element per sequence, so is the address.
        """
        return self.address and self.address + batch * self.batch + row * self.steps.row + head * self.steps.head


ABSENT = Place()


def numbers_of(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Return one int64 array (n,) for each field of `Row`, with its values in these n rows."""
    numbers = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * len(Row._fields))
    return numbers.reshape(len(rows), -1).T.copy()


class Spans:
    """The addresses of keys and values, in spans of `tokens` keys; each sequence has `count` spans.

    `numbers` has 8 int64 for each span: the addresses of k and v for head 0 and their strides between heads, and the
    same for the scales of k and v (`struct span` of forward.h). `k_step` and `v_step` are the strides from key to key,
    in bytes. All members of a key, which have the data type `dtype`, are adjacent.
    """

    __slots__ = ("_address", "_count", "dtype", "k_step", "numbers", "tokens", "v_step")

    def __init__(
        self, numbers: array[int] | NDArray[np.int64], tokens: int, dtype: torch.dtype, k_step: int, v_step: int,
        count: int = 1,
    ) -> None:  # fmt: skip
        self.numbers = np.asarray(numbers)  # no copy
        self._address = self.numbers.ctypes.data
        self._count = count
        self.tokens = tokens
        self.dtype, self.k_step, self.v_step = dtype, k_step, v_step

    def of_sequence(self, number: Any) -> Any:
        """Return the address of a sequence's first span; for an array of sequences, an array of addresses."""
        return self._address + SPAN * self._count * number


class QuerySteps(NamedTuple):
    """The strides of q, o and lse."""

    q: ByteSteps
    o: ByteSteps
    lse: ByteSteps = NOWHERE


class Rows(NamedTuple):
    """The queries of one sequence and their keys.

    `q`, `o`, `lse`, `slopes`, `sinks`, `mask` and `blocks` are addresses; 0 means absent.
    Query i sees the keys [i + low, i + high) among [start, stop). `spans` is the address of the sequence's first span
    in a `Spans`, and `first` is the position of that span's first key. `mask` and `blocks` (the block mask) are
    addresses for query 0 and key 0 of the sequence.
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
    sequence: int = 0  # number of the sequence, for dropout
    query: int = 0  # position of the first query, for dropout and the block mask
    head: int = 0  # the first key/value head; addresses are those of its first query head
    # `state`: address of the softmax state of earlier keys, or 0. `readers`: address of `reader_count` `struct reader`
    # (forward.h) if the queries are of several sequences, else 0.
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

    def keys_of_chunks(self) -> list[int]:
        """Return the number of keys in each chunk."""
        first = self.start // CHUNK
        edges = [self.start, *(n * CHUNK for n in range(first + 1, first + self.chunks)), self.stop]
        return [last - start for start, last in pairwise(edges)]

    def tiles(self, group: int, mask_row: int) -> Iterator[Rows]:
        """Yield the queries in tiles, each of which reads its keys once, of at most TILE rows or of one query.

        A query has `group` rows, one for each query head that shares a key/value head. `mask_row` is the stride of the
        mask from query to query in bytes.
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
