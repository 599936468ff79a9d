"""Find the cells of a score matrix that a block mask does not hide completely, and the order in which to compute them.

A cell is a rectangle of the score matrix, and the unit of computation. It has 128 to 255 queries and keys, whatever the
block size of the mask: torch's operators are not faster on smaller cells, and larger cells would contain more hidden
scores, which are computed for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.problems import bounds

_LEAST = 128  # minimum queries or keys of a cell; a cell has fewer than twice as many
Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a sequence, each of `size` (queries, keys), and flags (heads or 1, rows, columns of cells) for them.

    The band is the range of keys that the window and the causal mask allow.

    - `some`: at least one block of the cell is true in the block mask, and the band includes at least one score.
    - `cut`: the block mask hides a score of the cell.
    - `edge`, without the dimension of heads: the band hides a score, or the cell extends beyond the last key.
    """

    size: tuple[int, int]
    some: Flags
    cut: Flags
    edge: Flags

    @classmethod
    def of(cls, mask: Flags, spec: Spec, row: Row) -> Cells:
        """Return the cells of sequence `row`. `mask` is its block mask: (heads or 1, rows, columns of blocks)."""
        size = _cell(spec.options.block_size[0]), _cell(spec.options.block_size[1])
        counts = np.cumsum(np.cumsum(np.pad(mask, ((0, 0), (1, 0), (1, 0))), 1, np.int64), 2)
        (r0, r1), (c0, c1) = (
            _blocks(length, cell, block)
            for length, cell, block in zip((row.q_len, row.kv_len), size, spec.options.block_size, strict=True)
        )
        rows = counts[:, r1] - counts[:, r0]
        left = rows[:, :, c1] - rows[:, :, c0]
        some, cut = left > 0, left < (r1 - r0)[:, None] * (c1 - c0)
        seen, whole = _band(spec, row, size)
        return cls(size, some & seen, cut, ~whole)


class Group(NamedTuple):
    """Strips of cells that are computed in parallel, and the waves in which their cells are computed.

    A strip is a row of cells (the same queries) in the forward, and a column of cells (the same keys) in the backward.
    `strips` has the strips' numbers, those with most cells first. `waves[w]` has the w-th cell of each strip with more
    than w cells, which are the first strips of `strips`. A cell is given by the number of its column (see `groups`).
    """

    strips: Numbers
    waves: list[Numbers]


def groups(seen: Flags, each: int, together: int) -> Iterator[Group]:
    """Yield groups of the strips that have a cell to compute. `seen` (heads, strips, columns) is true for these cells.

    A group has at most `each` strips of each head, and at most `together` heads. The numbers of strips and columns
    continue from one head to the next. How a head's strips are grouped and ordered does not depend on other heads.
    """
    heads, strips, columns = seen.shape
    for head, start in product(range(0, heads, together), range(0, strips, each)):
        part = seen[head : head + together, start : start + each]
        counts = part.sum(2).reshape(-1)
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        if not len(order):
            continue
        counts, (of_head, strip) = counts[order], np.divmod(order, part.shape[1])
        of_head += head
        _, cells = part.reshape(-1, columns)[order].nonzero()
        first = np.cumsum(counts) - counts
        waves = []
        for wave in range(counts[0]):
            active = int(np.searchsorted(-counts, -wave))
            waves.append(cells[first[:active] + wave] + of_head[:active] * columns)
        yield Group(of_head * strips + start + strip, waves)


def _cell(block: int) -> int:
    """Return a cell's number of queries (or keys) for blocks of `block`: whole blocks, a divisor of a block, or 128."""
    if block < _LEAST:
        return block * -(-_LEAST // block)
    return next((n for n in range(_LEAST, 2 * _LEAST, 16) if block % n == 0), _LEAST)


def _blocks(length: int, cell: int, block: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return for each cell the index of its first block, and the index after its last block."""
    first = np.arange(0, length, cell)
    return first // block, (np.minimum(first + cell, length) - 1) // block + 1


def _band(spec: Spec, row: Row, size: tuple[int, int]) -> tuple[Flags, Flags]:
    """Return two arrays of flags, one per cell: the band includes any of its scores; the band includes all of them."""
    offset, (left, right) = row.offset, spec.window
    i, j = np.arange(0, row.q_len, size[0]), np.arange(0, row.kv_len, size[1])
    ends = [(i0, min(i0 + size[0], row.q_len) - 1) for i0 in i.tolist()]
    lo, hi = np.array([bounds.key_range(*each, offset, left, right, row.kv_len) for each in ends]).T[..., None]
    seen = (j + size[1] > lo) & (j < hi) & (lo < hi)
    lo, hi = np.array([bounds.full_key_range(*each, offset, left, right, row.kv_len) for each in ends]).T[..., None]
    return seen, (j >= lo) & (j + size[1] <= hi)
