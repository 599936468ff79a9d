"""Parts of keys that several sequences have in the same pages: one program for each in the place of one per sequence.

A part is shared if all queries see all its keys, and no option depends on positions. Other parts, and the merge of
parts, stay as they are: see cascade.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import NamedTuple

import numpy as np

from flashpoint_kernels.problems import bounds
from flashpoint_kernels.problems.problem import Problem
from flashpoint_kernels.triton_backend.host.schedule import ForwardList, Shape
from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.cascade import ITEM


class Cascade(NamedTuple):
    """The forward's programs of one kind, of which some read parts for several sequences.

    `alone` is like `ForwardList.items`, without the parts that are shared. `items` (n, ITEM) int32 and `members`
    (n, MEMBER) int32: see `attention_cascade`.
    """

    alone: np.ndarray
    items: np.ndarray
    members: np.ndarray


_full_key_range = FunctionType(bounds.full_key_range.__code__, {"min": np.minimum, "max": np.maximum})
# The columns that sequences with the same keys have in common: tensors of keys and values, pages, heads.
_COMMON = np.r_[
    col.K.value : col.V.value + 3, col.Q_ROWS.value, col.HEADS.value : col.GROUP.value + 1,
    col.PAGE_SIZE.value : col.V_SCALE.value + 4,
]  # fmt: skip


def shared_parts(problems: Sequence[Problem], ints: np.ndarray, floats: np.ndarray, found: ForwardList) -> Cascade:
    """Return the programs of `found`, with one for each part of keys that several sequences have in the same pages.

    `ints` and `floats` are the launch's table. Pages are compared where their numbers are known (`Problem.pages`).
    """
    tables = [None if p.pages is None else p.pages[row.index] for p in problems for row in p.rows]
    shape, unit = Shape(*ints[:, col.Q_LEN.value : col.GROUP.value + 1].T), ints[:, col.PAGE_SIZE.value]
    full_lo, full_hi = _full_key_range(0, shape.q_len - 1, shape.offset, shape.left, shape.right, shape.kv_len)
    count = shape.q_rows * shape.group
    joins = (2 * count <= found.rows) & (shape.q_len > 0) & (ints[:, col.ALIBI.value] == 0)
    joins &= np.array([table is not None for table in tables])
    row, _, start, stop, slot = found.items.T
    fits = joins[row] & (slot >= 0) & (start >= full_lo[row]) & (stop <= full_hi[row])
    fits &= (start % unit[row] == 0) & (stop % unit[row] == 0)
    common = [a.tobytes() + b.tobytes() for a, b in zip(ints[:, _COMMON], floats, strict=True)]
    alike: dict[tuple[bytes, int, int, bytes], list[int]] = {}
    for n in np.flatnonzero(fits).tolist():
        r, a, b = int(row[n]), int(start[n]), int(stop[n])
        size = int(unit[r])
        numbers = tables[r]
        assert numbers is not None
        alike.setdefault((common[r], a, b, numbers[a // size : b // size].tobytes()), []).append(n)
    items: list[tuple[int, int, int, int]] = []
    members: list[int] = []
    for (_, a, b, _), some in alike.items():
        if len(some) > 1:
            most = found.rows // int(count[row[some[0]]])
            items += [(len(members) + n, len(some[n : n + most]), a, b) for n in range(0, len(some), most)]
            members += some
    alone = np.delete(found.items, members, 0)
    pairs = found.items[members][:, [0, 4]]
    return Cascade(alone, np.array(items, np.int32).reshape(-1, ITEM.value), np.ascontiguousarray(pairs))
