"""Send a `vmap` of attention as one request: the mapped axes become additional sequences or heads. Needs only numpy.

Each tensor has `lead` axes before its own. A leading axis has the length of the mapped axis, or 1 if this tensor is not
mapped. Attention computes every sequence and every head independently, so the mapped axes are folded into the axis of
the sequences. A tensor with one number per head has no such axis. If it is mapped, or its gradient is wanted, the
mapped axes are folded into the axis of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint_contract.tensors import INDEX_TENSORS, TENSORS

Numbers = NDArray[Any]

_RAGGED = {"cu_seqlens_q": "q", "cu_seqlens_k": "k"}
# Tensors with one number per head, without an axis of sequences.
_HEADS_ONLY = {name for name, row in TENSORS.items() if row.per_head and "B" not in row.axes}


@dataclass(frozen=True)
class Fold:
    """One problem, as `tensors`, that contains all problems of the mapped axes. `batch` is the shape of these axes."""

    tensors: dict[str, Numbers]
    batch: tuple[int, ...]
    layout: str
    by_heads: bool

    def unfold(self, name: str, answer: Numbers, shape: Sequence[int]) -> Numbers:
        """Split an answer, which has the axes of tensor `name`, into one array for each problem: (*batch, *shape)."""
        count, axis = math.prod(self.batch), _axis(name, self.layout, self.by_heads)
        size = answer.shape[axis] // count
        each = answer.reshape(*answer.shape[:axis], count, size, *answer.shape[axis + 1 :])
        each = np.moveaxis(each, axis, 0)
        if math.prod(each.shape[1:]) > math.prod(shape):  # sequences or heads share this mask, so sum its gradient
            each = each.sum(axis + 1, dtype=np.promote_types(each.dtype, np.float32)).astype(each.dtype)
        return each.reshape(*self.batch, *shape)


def batch_shape(tensors: Mapping[str, Numbers], lead: int) -> tuple[int, ...]:
    """Return the lengths of the first `lead` axes, broadcast over all tensors."""
    return np.broadcast_shapes(*(t.shape[:lead] for t in tensors.values()))


def single(tensors: Mapping[str, Numbers], index: Sequence[int]) -> dict[str, Numbers]:
    """Return the problem at `index` of the mapped axes."""
    return {
        name: t[tuple(0 if t.shape[axis] == 1 else at for axis, at in enumerate(index))] for name, t in tensors.items()
    }


def fold(tensors: Mapping[str, Numbers], lead: int, layout: str, grads: Sequence[str]) -> Fold | None:
    """Return one problem that contains all mapped ones; None if a mapped tensor has no axis to fold into."""
    batch = batch_shape(tensors, lead)
    count = math.prod(batch)
    rank = tensors["q"].ndim - lead
    flat = {name: _one_axis(t, lead, batch) for name, t in tensors.items()}
    whole = {name: t.reshape(len(t), *_whole(name, t.shape[1:], rank, layout)) for name, t in flat.items()}
    mapped = {name for name, t in whole.items() if len(t) > 1}
    by_heads = not _HEADS_ONLY.isdisjoint(mapped | set(grads))
    if count == 0 or not (mapped.isdisjoint(INDEX_TENSORS) if by_heads else _are_full(whole)):
        return None

    folded = {}
    for name, t in whole.items():
        row = TENSORS[name]
        if row.is_index if by_heads else name in _HEADS_ONLY:
            folded[name] = t[0]
            continue
        axis = _axis(name, layout, by_heads)
        size = t.shape[1 + axis]
        if size == 1 and (row.broadcast or (row.shared and not by_heads)):
            if name not in mapped and f"d{name}" not in grads:
                folded[name] = t[0]  # all problems share this tensor
                continue
            size = _size(whole, layout, by_heads)
        t = np.broadcast_to(t, (count, *t.shape[1 : 1 + axis], size, *t.shape[2 + axis :]))
        if name in _RAGGED:
            folded[name] = _one_behind_another(t, whole[_RAGGED[name]].shape[1])
        else:
            folded[name] = np.moveaxis(t, 0, axis).reshape(*t.shape[1 : 1 + axis], count * size, *t.shape[2 + axis :])
    for name, t in folded.items():
        if TENSORS[name].shared and len(t) == 1:
            folded[name] = t[0]
    return Fold(folded, batch, layout, by_heads)


def _one_axis(t: Numbers, lead: int, batch: tuple[int, ...]) -> Numbers:
    """Return a tensor with its leading axes as one axis, of length 1 if none of them is mapped."""
    shape = t.shape[lead:]
    if math.prod(t.shape[:lead]) == 1:
        return t.reshape(1, *shape)
    return np.broadcast_to(t, (*batch, *shape)).reshape(math.prod(batch), *shape)


def _whole(name: str, shape: tuple[int, ...], rank: int, layout: str) -> tuple[int, ...]:
    """Return `shape`, a tensor's own axes, extended to all axes of the layout. `rank` is q's number of axes."""
    row = TENSORS[name]
    if row.shared:
        return shape if len(shape) == len(row.axes) else (1, *shape)
    if row.is_index or row.per_head or layout == "thd":
        return shape
    if row.broadcast:
        shape = (1,) * (rank - len(shape)) + shape
    if rank == 2:
        shape = (1, *shape)
    heads = _axis(name, layout, by_heads=True)
    return shape if rank == 4 else (*shape[:heads], 1, *shape[heads:])


def _axis(name: str, layout: str, by_heads: bool) -> int:
    """Return the index of a tensor's axis of heads if `by_heads`, else of sequences (in `thd`, of their rows).

    The tensor must have this axis.
    """
    row = TENSORS[name]
    if row.has_columns:
        return (2 if layout == "bshd" else 1) if by_heads else 0
    if name in _HEADS_ONLY:
        return 0
    if "Sq" in row.axes and not row.broadcast:  # lse; in `thd` its first axis is the heads
        return int(by_heads != (layout == "thd"))
    return int(by_heads)


def _size(whole: Mapping[str, Numbers], layout: str, by_heads: bool) -> int:
    """Return the number of heads of one problem if `by_heads`, else of its sequences."""
    if layout == "thd" and not by_heads:
        return int(whole["cu_seqlens_q"].shape[1]) - 1
    return int(whole["q"].shape[1 + _axis("q", layout, by_heads)])


def _are_full(whole: Mapping[str, Numbers]) -> bool:
    """Return whether ragged sequences cover all rows. Uncovered rows are invalid, but folding would hide them."""
    ends = [(t, whole[_RAGGED[name]].shape[1]) for name, t in whole.items() if name in _RAGGED]
    return all(t.shape[1] > 0 and bool((t[:, 0] == 0).all() and (t[:, -1] == rows).all()) for t, rows in ends)


def _one_behind_another(cu_seqlens: Numbers, rows: int) -> Numbers:
    """Join the `cu_seqlens` (count, n + 1) of problems with `rows` rows each: (count·n + 1,)."""
    starts = np.arange(len(cu_seqlens), dtype=np.int64)[:, None] * rows
    return np.concatenate([np.zeros(1, np.int64), (cu_seqlens[:, 1:] + starts).reshape(-1)])
