"""Choose the sequences of a launch whose dS is stored (kernels/stored.py), and divide their heads into chunks.

The chunks use the same workspace one after another, so it need not hold the dS of the whole launch. A chunk is made of
pieces: neighbouring key heads of a sequence, with all query heads that share them. A piece is one more row of the
launch's table, with the addresses of its first heads, so kernels know nothing of chunks. Each head is computed alone:
chunks change no bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from flashpoint_kernels.problems.workspace import ITEM, KEYS, MOST, ds_elements
from flashpoint_kernels.triton_backend.host.configurations import Config
from flashpoint_kernels.triton_backend.host.schedule import Shape, block_rows
from flashpoint_kernels.triton_backend.kernels import columns as col

_QUERIES = 64  # of a stored tile
_OF_QUERY_HEADS = (col.Q, col.DO, col.DQ)
_OF_KEY_HEADS = (col.K, col.V, col.DK, col.DV)


def is_stored(shapes: np.ndarray, config: Config) -> np.ndarray:
    """Return for each sequence whether its dS is stored: it has no packed blocks, and its dS is at most MOST bytes."""
    shape = Shape(*shapes.T)
    small = ds_elements(shape.q_len, shape.kv_len) * (ITEM * shape.group) <= MOST
    stored: np.ndarray = small & (block_rows(shape, config) == 0)
    return stored


class StoredWork(NamedTuple):
    """The programs of a chunk of heads; each array is (n, 2) int32: table row, and first row of the block.

    `storing` has the blocks of keys of the kernel that stores dS, `keys` and `queries` those of the kernels that read
    it, for dK and for dQ. `heads` and `kv_heads` are those of the chunk.
    """

    storing: np.ndarray
    keys: np.ndarray
    queries: np.ndarray
    heads: int
    kv_heads: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """Pieces of different sequences that use the workspace together.

    `rows` are the pieces' rows in the table, and `of` the rows of their sequences. `heads` and `kv_heads` are the most
    query heads and key heads of a piece.
    """

    rows: np.ndarray
    of: np.ndarray
    heads: int
    kv_heads: int

    def items(self, items: np.ndarray) -> np.ndarray:
        """Return the work items of the pieces, in the order of `items`, which are those of the sequences."""
        rows = np.full(1 + max(items[:, 0].max(initial=0), self.of.max(initial=0)), -1)
        rows[self.of] = self.rows
        found = rows[items[:, 0]]
        chosen: np.ndarray = items[found >= 0]
        chosen[:, 0] = found[found >= 0]
        return chosen


class Pieces:
    """The pieces of a launch: their chunks, and their rows of the table.

    `of_table` has, for each row of the table with the pieces, the row of its sequence.
    """

    def __init__(self, ints: np.ndarray, stored: np.ndarray, most: int, device: torch.device) -> None:
        """Divide the heads of the rows `stored` of `ints`. A chunk has at most `most` bytes, or one key head."""
        rows = np.flatnonzero(stored)
        lengths = ints[rows][:, [col.Q_LEN.value, col.KV_LEN.value]]
        self._device = device
        self._of_head = ds_elements(*lengths.T)
        self._group = ints[rows, col.GROUP.value]
        kv_heads = ints[rows, col.HEADS.value] // self._group
        of_key_head = self._of_head * self._group
        owner = np.repeat(np.arange(len(rows)), kv_heads)  # for each key head
        ends, firsts = np.cumsum(of_key_head[owner]), np.cumsum(kv_heads) - kv_heads
        self._pieces: list[np.ndarray] = []  # index in `rows`, first key head, number of key heads, first number of dS
        self.chunks: list[Chunk] = []
        first, count, self._elements = 0, len(ints), 0
        while first < len(owner):
            before = int(ends[first - 1]) if first else 0
            end = max(int(np.searchsorted(ends, before + most // ITEM, "right")), first + 1)
            of, at, heads = np.unique(owner[first:end], return_index=True, return_counts=True)
            starts = ends[first + at] - of_key_head[of] - before
            self._pieces.append(np.stack([of, first + at - firsts[of], heads, starts]))
            number = count + np.arange(len(of))
            self.chunks.append(Chunk(number, rows[of], int((heads * self._group[of]).max()), int(heads.max())))
            self._elements = max(self._elements, int(ends[end - 1]) - before)
            first, count = end, count + len(of)
        self._rows = rows
        self.of_table = np.concatenate([np.arange(len(ints)), *(chunk.of for chunk in self.chunks)])

    def table(self, ints: np.ndarray) -> np.ndarray:
        """Allocate the workspace, and return the pieces' rows of the table, whose other rows `ints` are complete."""
        of, first, heads, start = np.concatenate(self._pieces or [np.empty((4, 0), np.int64)], axis=1)
        # Any type of 16 bits: the kernels have pointers to their own.
        self.workspace = torch.empty(self._elements, dtype=torch.float16, device=self._device)
        added: np.ndarray = ints[self._rows[of]]
        group = self._group[of]
        for columns, size, skipped in (
            (_OF_QUERY_HEADS, ITEM, first * group), (_OF_KEY_HEADS, ITEM, first), ((col.STATS,), 4, first * group),
        ):  # fmt: skip
            for column in columns:
                at = column.value
                added[:, at] += np.where(added[:, at] != 0, size * skipped * added[:, at + 1], 0)
        added[:, col.HEADS.value] = heads * group
        added[:, col.DS.value] = self.workspace.data_ptr() + ITEM * start
        added[:, col.DS.value + 1] = self._of_head[of]
        added[:, col.DS.value + 2] = -(-added[:, col.KV_LEN.value] // KEYS) * KEYS * _QUERIES
        return added
