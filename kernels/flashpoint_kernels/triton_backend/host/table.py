"""The table of sequences that a launch reads: one row per sequence, with addresses, strides, lengths and scalars.

Through this table, requests of any lengths, batch sizes and head counts run in one launch: nothing is padded or packed.
Addresses and strides are int64, so no offset overflows. A row does not depend on other rows. The columns are those of
columns.py; `Table` copies a tensor whose last dimension does not have stride 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint_contract.spec import Row
from flashpoint_kernels.problems.problem import Problem, narrowed
from flashpoint_kernels.triton_backend.kernels import columns as col

_TENSORS = {"q": col.Q, "k": col.K, "v": col.V, "o": col.O, "do": col.DO, "dq": col.DQ, "dk": col.DK, "dv": col.DV}
_ROW_VECTORS = {"lse": col.LSE, "dlse": col.DLSE}
_KEY_TENSORS = ("k", "v", "dk", "dv")
_READ_BY_TILE = ("k", "v")
_AXES = {"bhsd": (1, 2), "bshd": (2, 1), "thd": (2, 1)}  # the axes of heads and of rows in a tensor of four dimensions
_VECTORS = {"alibi_slopes": col.ALIBI, "sinks": col.SINKS, "dsinks": col.DSINKS}
_MASKS = {"attn_mask": col.MASK, "dattn_mask": col.DMASK, "block_mask": col.BLOCKS}
_SCALES = {"k_scale": col.K_SCALE, "v_scale": col.V_SCALE}
_PAGE_STRIDES = {"k": col.K_PAGE, "v": col.V_PAGE}
_VECTOR_BYTES = 16  # bytes of the widest load
# The forward copies k or v if the stride between keys is at least this many elements: offsets in a tile have 32 bits.
FARTHEST = 2**23


SHAPE = slice(col.Q_LEN.value, col.GROUP.value + 1)  # the columns that form schedule.Shape, in its order

Numbers = int | np.ndarray  # a value for a single sequence, or an array with one value per sequence


class Table:
    """The table's rows for one request. `alive` keeps the tensors whose addresses are in the rows.

    `aligned`: every row of every head starts at a multiple of the widest load. `describable`: the tensors are aligned,
    and the copy engine (TMA) can load each of them. This requires positive strides of rows, and in tensors of queries
    also of heads, and excludes pages and scales.
    """

    def __init__(self, problem: Problem, extra: Mapping[str, Tensor]) -> None:
        """Make the rows for `problem`; `extra` holds further canonical tensors, for example scratch memory."""
        self.aligned = self.describable = True
        self.alive: list[Tensor] = []
        self._problem, spec, options = problem, problem.spec, problem.spec.options
        rows: Any = _columns(problem.rows)
        self._rows = rows
        self._moves = rows is not problem.rows[0] or rows.batch + rows.q_start + rows.kv_start > 0
        self._common = [0] * col.WIDTH.value
        self._own: list[tuple[int, np.ndarray]] = []  # (column, the number to add to it for each sequence)
        given = {**problem.tensors, **problem.outputs, **extra}
        if "dsinks" not in extra:
            given.pop("dsinks", None)  # kernels sum it in scratch memory
        for name, t in given.items():
            if (place := _PLACES.get(name)) is not None:
                place(self, name, t)
        if spec.paged:
            self._place_pages(problem.tensors["block_table"])
        self._write(col.BLOCK_SIZE.value, *options.block_size)
        self._write(col.LEFT.value, *spec.window, spec.q_heads, spec.q_heads // spec.kv_heads)
        if options.dropout_p and problem.seed is not None:
            signed = problem.seed - (1 << 64) if problem.seed >> 63 else problem.seed
            self._write(col.SEED.value, signed, math.ceil(options.dropout_p * 2**32))
        lengths = rows.q_len, rows.q_rows, rows.kv_len, rows.kv_rows, rows.offset
        count = len(problem.rows)
        if count == 1:
            self._write(col.Q_LEN.value, *lengths)
            self._common[col.INDEX.value] = rows.index
            self.ints = np.array([self._common], np.int64)
        else:
            self.ints = np.array([self._common], np.int64).repeat(count, 0)
            for column, numbers in zip(range(col.Q_LEN.value, col.OFFSET.value + 1), lengths, strict=True):
                self.ints[:, column] = numbers
            self.ints[:, col.INDEX.value] = rows.index
        for at, numbers in self._own:
            self.ints[:, at] += numbers
        scalars = spec.scale, options.softcap, 1.0 / (1.0 - options.dropout_p), 0.0
        self.floats = np.array([scalars] * count, np.float32)

    def _write(self, column: int, *numbers: int) -> None:
        self._common[column : column + len(numbers)] = numbers

    def _add(self, column: int, numbers: Numbers) -> None:
        if isinstance(numbers, int):
            self._common[column] += numbers
        else:
            self._own.append((column, numbers))

    def _locate(self, t: Tensor, column: int, *strides: int) -> None:
        """Write the address of the first element of `t`, then `strides`."""
        self._common[column : column + 1 + len(strides)] = t.data_ptr(), *strides
        self.alive.append(t)

    def _move(self, column: int, stride: int, numbers: Numbers) -> None:
        """Add `numbers` times `stride` bytes to the sequences' addresses in `column`.

        An array `numbers` must not decrease: if its last element is 0, all are 0, and nothing is added.
        """
        if stride and (isinstance(numbers, int) or numbers[-1]):
            self._add(column, numbers * stride)

    def _place_pages(self, numbers: Tensor) -> None:
        """Write the address of each sequence's page numbers."""
        numbers = _of_columns(numbers)
        self._locate(numbers, col.PAGES.value, self._problem.spec.page_size, self._problem.spec.pool)
        self._move(col.PAGES.value, 4 * numbers.stride(0), self._rows.index)
        self.describable = False

    def _place_scale(self, name: str, t: Tensor) -> None:
        """Write the address and strides of the scales of 8-bit keys or values: per row, or per head."""
        t, spec = self._problem.canonical(name, t).float(), self._problem.spec
        column = _SCALES[name].value
        self.describable = False
        if not spec.per_row(name):
            self._locate(t, column, t.stride(1), 0, 0)
            self._move(column, 4 * t.stride(0) if t.shape[0] > 1 else 0, self._rows.index)
        elif spec.paged:
            self._locate(t, column, t.stride(1), t.stride(2), t.stride(0))
        else:
            self._locate(t, column, t.stride(1), t.stride(2), 0)
            self._move(column, 4 * t.stride(0), self._rows.batch)
            self._move(column, 4 * t.stride(2), self._rows.kv_start)

    def _place_vector(self, name: str, t: Tensor) -> None:
        """Write the address of the vector `name`, which has one number per head."""
        t = _of_columns(self._problem.canonical(name, t).float())
        self._locate(t, _VECTORS[name].value)
        self._move(_VECTORS[name].value, 4 * t.stride(0) if t.ndim == 2 else 0, self._rows.index)

    def _place_mask(self, name: str, t: Tensor) -> None:
        t = self._problem.canonical(name, narrowed(t) if name == "attn_mask" and t.dtype == torch.float64 else t)
        batch, *strides = t.stride()
        self._locate(t, _MASKS[name].value, *strides)
        self._move(_MASKS[name].value, t.element_size() * batch, self._rows.batch)

    def _place_row_vector(self, name: str, t: Tensor) -> None:
        """Write the address of lse or dlse, which have one number per row, and their stride between heads."""
        column = _ROW_VECTORS[name].value
        t = _of_columns(self._problem.canonical(name, t if t.dtype == torch.float32 else t.float()))
        batch, head, _ = t.stride()
        self._locate(t, column, head, 1)
        self._move(column, 4 * batch, self._rows.batch)
        self._move(column, 4, self._rows.q_start)

    def _place(self, name: str, t: Tensor) -> None:
        """Write the address and strides of the rows of a tensor.

        Most of the time to make a table is spent here, so the code has no loops.
        """
        spec, rows, common, column = self._problem.spec, self._rows, self._common, _TENSORS[name].value
        strides, shape = t.stride(), t.shape
        h, r = _AXES[spec.options.layout]
        if len(strides) != 4:
            t, h, r = self._problem.canonical(name, t), 1, 2
            strides, shape = t.stride(), t.shape
        far = strides[r] >= FARTHEST and name in _READ_BY_TILE and spec.direction == "forward" and not spec.paged
        if far or (strides[3] != 1 and shape[3] != 1):  # addresses of paged keys always have 64 bits
            t, h, r = (t if r == 2 else t.transpose(1, 2)).contiguous(), 1, 2
            strides, shape = t.stride(), t.shape
        # The stride of a dimension of size 1 is never used: write one that all loads and the copy engine accept.
        batch = strides[0] if shape[0] > 1 else _VECTOR_BYTES
        head = strides[h] if shape[h] > 1 else _VECTOR_BYTES
        row = strides[r] if shape[r] > 1 else _VECTOR_BYTES
        address, size, of_keys = t.data_ptr(), t.element_size(), name in _KEY_TENSORS
        common[column], common[column + 1], common[column + 2] = address, head, row
        self.alive.append(t)
        if spec.paged and of_keys:
            common[_PAGE_STRIDES[name].value] = strides[0]
        elif self._moves:
            self._move(column, size * strides[0], rows.batch)
            self._move(column, size * strides[r], rows.kv_start if of_keys else rows.q_start)
        if (address | size * (batch | head | row)) % _VECTOR_BYTES:
            self.aligned = self.describable = False
        elif row <= 0 or (head <= 0 and not of_keys):
            self.describable = False


def _columns(rows: Sequence[Row]) -> Any:
    """Return the row of a single sequence; for several sequences return a Row whose fields are arrays."""
    if len(rows) == 1:
        return rows[0]
    return Row(*np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * len(Row._fields)).reshape(len(rows), -1).T)


def _of_columns(t: Tensor) -> Tensor:
    """Return `t` if its last dimension has stride 1, else a copy."""
    return t if t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


_PLACES: dict[str, Callable[[Table, str, Tensor], None]] = {
    **dict.fromkeys(_TENSORS, Table._place),
    **dict.fromkeys(_ROW_VECTORS, Table._place_row_vector),
    **dict.fromkeys(_MASKS, Table._place_mask),
    **dict.fromkeys(_VECTORS, Table._place_vector),
    **dict.fromkeys(_SCALES, Table._place_scale),
}
