"""Represent a problem in one form for all layouts: its tensors as views (B,H,S,D), and its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashpoint._calls.arrays import Array, to_like, to_numpy
from flashpoint._shards.cut import UNBOUNDED, Band
from flashpoint.errors import all_invalid
from flashpoint_contract.options import OPTIONS, Direction, Options, ProblemError
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.spec import Row, Spec
from flashpoint_contract.spec import plan as check
from flashpoint_contract.tensors import INDEX_TENSORS, REQUIRED, SCALES, TENSORS, TensorInfo, refusals

Numbers = NDArray[Any]


class Rows(NamedTuple):
    """Sequences of equal lengths and offset. `batch` is their slice of the batch axis, `sequences` their slice of all
    sequences of the request. They start at rows `q_start` of q and `kv_start` of k.
    """

    batch: slice
    sequences: slice
    q_start: int
    kv_start: int
    band: Band


@dataclass(frozen=True)
class Problem:
    """The tensors of a problem, as views: q (B,Hq,Sq,D), k and v (B,Hk,Sk,·). Layout `thd` has B = 1.

    A mask has four dimensions, each of full size or 1. A tensor with one number per head is (Hq,) or (B or 1,Hq). `lse`
    is (B,Hq,Sq). The scales of 8-bit k and v are (B,Hk,Sk).
    """

    options: AttentionOptions
    spec: Spec
    tensors: dict[str, Numbers]
    rows: tuple[Rows, ...]
    shapes: dict[str, tuple[int, ...]]  # the shapes of the caller's tensors
    like: Array

    @property
    def on_reference(self) -> bool:
        """Return whether only the backend `reference` can compute this problem. `plan` then cuts keys only on request.

        The answers for cut keys are merged. `reference` cannot compute gradients from a merged lse, and a merged lse is
        float32, which is too inexact for float64.
        """
        return self.options.backend == "reference" or not self.spec.features.isdisjoint({"float64", "large_head_dim"})

    @property
    def sum_dtype(self) -> type[np.floating[Any]]:
        """Return the dtype in which parts of an answer are summed."""
        return np.float64 if self.spec.dtype == "float64" else np.float32

    def view(self, array: Numbers) -> Numbers:
        """Return a tensor of the caller's layout as a view (B,H,S,D)."""
        return _view(array, self.options.layout)

    def answer(self, name: str, array: Numbers) -> Any:
        """Return tensor `name` of the answer in its final dtype, as a numpy array or torch tensor like q."""
        source = {"o": "q"}.get(name, name[1:])
        dtype = np.dtype(np.float32) if name == "lse" else self.tensors[source].dtype
        with np.errstate(over="ignore"):  # an overflow gives inf, the same as on a server
            return to_like(array.astype(dtype, copy=False), self.like)


def problem(tensors: Mapping[str, Any], options: AttentionOptions, direction: Direction) -> Problem:
    """Return the `Problem` of `tensors` and `options`. Optional tensors may be None. Raises InvalidInputError, which
    names each wrong field.
    """
    given = {name: to_numpy(name, t) for name, t in tensors.items() if t is not None or name in REQUIRED[direction]}
    used = [*given, *(name for name, option in OPTIONS.items() if getattr(options, name) != option.default)]
    if refused := refusals("sharded", used):
        raise all_invalid((name, f"{reason}: not sharded") for name, reason in refused)
    shapes = {name: t.shape for name, t in given.items()}
    infos = {name: TensorInfo(t.dtype.name, t.shape) for name, t in given.items()}
    index = {name: given.pop(name).tolist() for name in INDEX_TENSORS if name in given}
    try:
        spec = check(infos, Options(**options.model_dump()), direction)
        rows = tuple(_rows(spec, index))
    except ProblemError as error:
        raise all_invalid(error.errors) from None
    views = {name: _canonical(name, t, spec) for name, t in given.items() if name not in SCALES}
    views |= {name: _scales(name, given[name], spec, index) for name in SCALES if name in given}
    return Problem(options, spec, views, rows, shapes, tensors["q"])


def _view(array: Numbers, layout: str) -> Numbers:
    if layout == "thd":
        return array.swapaxes(0, 1)[None]
    if array.ndim == 4:
        return array if layout == "bhsd" else array.swapaxes(1, 2)
    return array[:, None] if array.ndim == 3 else array[None, None]


def _canonical(name: str, t: Numbers, spec: Spec) -> Numbers:
    """Return a tensor in the form that `Problem` describes."""
    row = TENSORS[name]
    if row.has_columns:
        return _view(t, spec.options.layout)
    if row.broadcast:
        t = t.reshape((1,) * (spec.rank - t.ndim) + t.shape)
        return t[:, None] if spec.rank == 3 else t.reshape((1,) * (4 - spec.rank) + t.shape)
    if row.per_head:
        return t.reshape(-1, spec.q_heads) if row.shared else t
    return t.reshape(1 if spec.ragged else spec.batch, spec.q_heads, spec.q_len)


def _scales(name: str, t: Numbers, spec: Spec, index: Mapping[str, list[int]]) -> Numbers:
    """Return the scales of k or v, one for each row: (B,Hk,Sk)."""
    rows = spec.kv_heads, spec.kv_len
    if spec.per_row(name):
        t = t.T[None] if spec.ragged else t
        turned = not spec.ragged and spec.rank == 4 and spec.options.layout == "bshd"
        return t.swapaxes(1, 2) if turned else t.reshape(-1, *rows)
    t = np.broadcast_to(t, (spec.batch, spec.kv_heads))
    if spec.ragged:
        return np.repeat(t, np.diff(index["cu_seqlens_k"]), axis=0).T[None]
    return np.broadcast_to(t[..., None], (spec.batch, *rows))


def _rows(spec: Spec, index: Mapping[str, list[int]]) -> Iterator[Rows]:
    """Yield the sequences of a problem: one `Rows` if they have equal lengths and offsets, else one for each."""
    options = spec.options
    left, right = (UNBOUNDED if side < 0 else side for side in options.window)

    def band(row: Row) -> Band:
        return Band(row.q_len, row.kv_len, row.offset, left, min(right, 0) if options.causal else right)

    rows = spec.rows(index)
    if rows and (not index or (index.keys() == {"offset"} and len({row.offset for row in rows}) == 1)):
        yield Rows(slice(0, spec.batch), slice(0, spec.batch), 0, 0, band(rows[0]))
        return
    for row in rows:
        at, sequence = slice(row.batch, row.batch + 1), slice(row.index, row.index + 1)
        yield Rows(at, sequence, row.q_start, row.kv_start, band(row))
