"""Find parts of keys that several sequences have in the same pages, so that one program reads a part for all of them.

A part is shared if all queries see all its keys, and no option depends on positions. Other parts, and the merge of
parts, do not change: see cascade.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import NamedTuple

import numpy as np

from flashpoint_kernels.problems import bounds
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.triton_backend.host.schedule import ForwardList, Shape
from flashpoint_kernels.triton_backend.host.table import SHAPE
from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.cascade import ITEM


class Cascade(NamedTuple):
    """The forward's programs for one kind of blocks. Some programs read a part of keys for several sequences.

    `alone` is like `ForwardList.items`, without the parts that are shared. `items` (n, ITEM) int32 and `members`
    (n, MEMBER) int32: see `attention_cascade`.
    """

    alone: np.ndarray
    items: np.ndarray
    members: np.ndarray


_full_key_range = FunctionType(bounds.full_key_range.__code__, {"min": np.minimum, "max": np.maximum})
# The table columns that are equal for sequences with the same keys: tensors of keys and values, pages, heads.
_COMMON = np.r_[
    col.K.value : col.V.value + 3, col.Q_ROWS.value, col.HEADS.value : col.GROUP.value + 1,
    col.PAGE_SIZE.value : col.V_SCALE.value + 4,
]  # fmt: skip


def shared_parts(problems: Sequence[Problem], ints: np.ndarray, floats: np.ndarray, work: ForwardList) -> Cascade:
    """Return the programs of `work`, with one program in place of several that read the same pages.

    `ints` and `floats` are the launch's table. Pages are compared where their numbers are known (`Problem.pages`).
    """
    shape, unit = Shape(*ints[:, SHAPE].T), ints[:, col.PAGE_SIZE.value]
    full_lo, full_hi = _full_key_range(0, shape.q_len - 1, shape.offset, shape.left, shape.right, shape.kv_len)
    count = shape.q_rows * shape.group
    joins = (2 * count <= work.rows) & (shape.q_len > 0) & (ints[:, col.ALIBI.value] == 0)
    row, _, start, stop, slot = work.items.T
    fits = joins[row] & (slot >= 0) & (start >= full_lo[row]) & (stop <= full_hi[row])
    fits &= (start % unit[row] == 0) & (stop % unit[row] == 0)
    classes: dict[tuple[bytes, int], list[tuple[bytes, int]]] = {}
    size = dict(zip(row[fits].tolist(), (stop - start)[fits].tolist(), strict=True))
    tables = [None if p.pages is None else p.pages[each.index] for p in problems for each in p.rows]
    for r, keys in size.items():
        if (table := tables[r]) is not None:
            common = ints[r, _COMMON].tobytes() + floats[r].tobytes()
            classes.setdefault((common, keys), []).append((table.tobytes(), r))
    chosen: list[np.ndarray] = []
    items: list[np.ndarray] = []
    for alike in classes.values():
        if len(alike) > 1:
            rows = np.array([r for _, r in sorted(alike)])  # then sequences with long common prefixes are neighbours
            of_class = np.flatnonzero(fits & np.isin(row, rows))
            groups, edges = _groups(rows, work.items[of_class], [tables[r] for r in rows], int(unit[rows[0]]))
            places = _chunks(edges, work.rows // int(count[rows[0]]))
            first = work.items[of_class[groups[places[:, 0]]]] if len(places) else work.items[:0]
            done = sum(map(len, chosen))
            items.append(np.concatenate([places + np.array([done, 0]), first[:, 2:4]], 1))
            chosen.append(of_class[groups])
    members = np.concatenate([np.empty(0, np.int64), *chosen])
    return Cascade(
        np.delete(work.items, members, 0),
        np.concatenate([np.empty((0, ITEM.value), np.int32), *items]).astype(np.int32),
        np.ascontiguousarray(work.items[members][:, [0, 4]]),
    )


def _groups(
    rows: np.ndarray, items: np.ndarray, tables: Sequence[np.ndarray | None], unit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Group items that read the same pages. Return (indices of `items`, edges).

    Group n is indices[edges[n] : edges[n + 1]], and has at least two items. Only neighbours among `rows` are compared.
    """
    starts = np.unique(items[:, 2])
    at = np.full((len(rows), len(starts)), -1)  # index of each sequence's item for each part; -1: none
    order = np.argsort(rows)
    sequence = order[np.searchsorted(rows, items[:, 0], sorter=order)]
    at[sequence, np.searchsorted(starts, items[:, 2])] = np.arange(len(items))
    width = int(items[:, 3].max()) // unit
    numbers = np.full((len(rows), width), -1, np.int64)
    for of_sequence, table in zip(numbers, tables, strict=True):
        assert table is not None
        of_sequence[: len(table)] = table[:width]
    same = np.logical_and.reduceat(numbers[1:] == numbers[:-1], starts // unit, axis=1)
    stops = np.where(at >= 0, items[at, 3], -1)
    # Whether each part has the same keys, in the same pages, as this part of the previous sequence.
    joined = same & (stops[1:] == stops[:-1]) & (stops[1:] >= 0)
    begins = np.concatenate([np.ones((1, len(starts)), bool), ~joined])
    number = np.cumsum(begins.T.reshape(-1)).reshape(len(starts), -1).T - 1  # number the groups part by part
    sizes = np.bincount(number.reshape(-1))
    shared = (sizes[number] > 1).T
    edges = np.concatenate([[0], np.cumsum(sizes[sizes > 1])])
    return at.T[shared], edges


def _chunks(edges: np.ndarray, largest: int) -> np.ndarray:
    """Cut each group of members, between two `edges`, into work items of at most `largest` members.

    Return (n, 2): the first member of each work item, and its number of members.
    """
    counts = np.diff(edges)
    pieces = -(-counts // largest)
    group, nth = np.repeat(np.arange(len(counts)), pieces), np.arange(pieces.sum())
    nth -= np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = edges[:-1][group] + nth * largest
    return np.stack([first, np.minimum(edges[1:][group] - first, largest)], 1)
