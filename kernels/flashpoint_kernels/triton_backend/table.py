"""The table of sequences that a launch reads: one row per sequence, with addresses, strides, lengths and scalars.

Through this table, requests of any lengths, batch sizes and head counts run in one launch: nothing is padded or packed.
Addresses and strides are int64, so no offset overflows. A row does not depend on other rows. A tensor takes three
columns: the address of (row 0, head 0), then the strides of a head and of a row, in elements. The last dimension has
stride 1; `Table.of` copies a tensor that does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from flashpoint_kernels.problem import Problem, narrowed

# int64 columns
Q, K, V, O, LSE = (tl.constexpr(3 * n) for n in range(5))  # noqa: E741
DO, DQ, DK, DV, DLSE, STATS = (tl.constexpr(3 * n) for n in range(5, 11))
MASK, DMASK = tl.constexpr(33), tl.constexpr(37)  # address; strides of a head, a row, a column
ALIBI, SINKS, DSINKS = tl.constexpr(41), tl.constexpr(42), tl.constexpr(43)  # address of head 0, stride 1; 0: none
Q_LEN, Q_ROWS, KV_LEN, KV_ROWS = (tl.constexpr(n) for n in range(44, 48))  # valid rows, rows with padding
# query i sees key j iff -LEFT <= j - i - OFFSET <= RIGHT
OFFSET, LEFT, RIGHT = (tl.constexpr(n) for n in range(48, 51))
HEADS, GROUP = tl.constexpr(51), tl.constexpr(52)  # query heads, and how many of them share a key/value head
# dropout: sequence, key; words below this are dropped
INDEX, SEED, DROP_BELOW = (tl.constexpr(n) for n in range(53, 56))
PAGES, PAGE_SIZE, POOL = (tl.constexpr(n) for n in range(56, 59))  # address of the sequence's page numbers, int32
K_PAGE, V_PAGE = tl.constexpr(59), tl.constexpr(60)  # strides of a page
K_SCALE, V_SCALE = tl.constexpr(61), tl.constexpr(65)  # float32: address; strides of a head, a row, a page
BLOCKS = tl.constexpr(69)  # address of the block mask; strides of a head, a row, a column
BLOCK_SIZE = tl.constexpr(73)  # queries, keys of a block
WIDTH = tl.constexpr(75)

# float32 columns
SCALE, SOFTCAP, KEEP_SCALE = (tl.constexpr(n) for n in range(3))
SCALARS = tl.constexpr(4)

_TENSORS = {"q": Q, "k": K, "v": V, "o": O, "do": DO, "dq": DQ, "dk": DK, "dv": DV}
_ROW_VECTORS = {"lse": LSE, "dlse": DLSE}
_KEY_TENSORS = ("k", "v", "dk", "dv")
_VECTORS = {"alibi_slopes": ALIBI, "sinks": SINKS, "dsinks": DSINKS}
_MASKS = {"attn_mask": MASK, "dattn_mask": DMASK, "block_mask": BLOCKS}
_SCALES = {"k_scale": K_SCALE, "v_scale": V_SCALE}
_PAGE_STRIDES = {"k": K_PAGE, "v": V_PAGE}
_VECTOR_BYTES = 16  # of the widest load
FARTHEST = 2**23  # elements between two keys, in the forward: offsets within a tile have 32 bits


@dataclass(eq=False)
class Table:
    """One request's rows. `alive` holds the tensors whose addresses are in the rows.

    `aligned`: every row of every head starts at a multiple of the widest load. `describable`: the copy engine can also
    load each tensor. That requires that no two rows of a head share memory, and no two heads of a tensor that is
    described by group.
    """

    ints: np.ndarray
    floats: np.ndarray
    aligned: bool = True
    describable: bool = True
    alive: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem, extra: dict[str, Tensor]) -> Table:
        """Return the rows for `problem`; `extra` holds further canonical tensors (scratch memory, for example
        `dsinks`).
        """
        spec = problem.spec
        n = len(problem.rows)
        table = cls(np.zeros((n, WIDTH.value), np.int64), np.zeros((n, SCALARS.value), np.float32))
        for name in (*_TENSORS, *_ROW_VECTORS, *_MASKS, *_VECTORS, *_SCALES):
            if name in extra:
                table._place(name, extra[name], problem)
            elif name == "attn_mask" and name in problem.tensors and problem.tensors[name].dtype == torch.float64:
                table._place(name, problem.canonical(name, narrowed(problem.tensors[name])), problem)
            elif name in problem.tensors or (name in problem.outputs and name != "dsinks"):
                table._place(name, problem.view(name), problem)
        if spec.paged:
            table._place_pages(problem)
        left, right = spec.window
        p = spec.options.dropout_p
        ints = table.ints
        for at, column in (
            ("q_len", Q_LEN),
            ("q_rows", Q_ROWS),
            ("kv_len", KV_LEN),
            ("kv_rows", KV_ROWS),
            ("index", INDEX),
        ):
            ints[:, column.value] = [getattr(row, at) for row in problem.rows]
        ints[:, BLOCK_SIZE.value], ints[:, BLOCK_SIZE.value + 1] = spec.options.block_size
        ints[:, OFFSET.value] = [spec.offset(row.q_len, row.kv_len) for row in problem.rows]
        ints[:, LEFT.value], ints[:, RIGHT.value] = left, right
        ints[:, HEADS.value], ints[:, GROUP.value] = spec.q_heads, spec.q_heads // spec.kv_heads
        if p and problem.seed is not None:
            ints[:, SEED.value] = np.uint64(problem.seed).astype(np.int64)
            ints[:, DROP_BELOW.value] = math.ceil(p * 2**32)
        table.floats[:, : KEEP_SCALE.value + 1] = spec.scale, spec.options.softcap, 1.0 / (1.0 - p)
        return table

    def _place_pages(self, problem: Problem) -> None:
        """Write the address of each sequence's page numbers."""
        numbers = problem.tensors["block_table"]
        numbers = numbers if numbers.shape[1] == 1 or numbers.stride(1) == 1 else numbers.contiguous()
        address = [numbers.data_ptr() + 4 * numbers.stride(0) * row.index for row in problem.rows]
        self.ints[:, PAGES.value] = address
        self.ints[:, PAGE_SIZE.value], self.ints[:, POOL.value] = problem.spec.page_size, problem.spec.pool
        self.describable = False
        self.alive.append(numbers)

    def _place_scale(self, name: str, t: Tensor, problem: Problem) -> None:
        """Write the address and strides of the scales of 8-bit keys or values: per row, or per head."""
        t = t.float()
        column, rows = _SCALES[name].value, problem.rows
        if not problem.spec.per_row(name):
            step = t.stride(0) if t.shape[0] > 1 else 0
            self._write(column, [t.data_ptr() + 4 * step * row.index for row in rows], t.stride(1), 0, 0)
        elif problem.spec.paged:
            self._write(column, [t.data_ptr()] * len(rows), t.stride(1), t.stride(2), t.stride(0))
        else:
            address = [t.data_ptr() + 4 * (t.stride(0) * row.batch + t.stride(2) * row.kv_start) for row in rows]
            self._write(column, address, t.stride(1), t.stride(2), 0)
        self.describable = False
        self.alive.append(t)

    def _place(self, name: str, t: Tensor, problem: Problem) -> None:
        """Write the addresses and strides of canonical `t` (see problem.py) into every row."""
        rows = problem.rows
        if name in _SCALES:
            self._place_scale(name, t, problem)
            return
        if name in _VECTORS:
            t = t.float()
            t = t if t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()
            step = t.stride(0) if t.ndim == 2 else 0
            self.ints[:, _VECTORS[name].value] = [t.data_ptr() + 4 * step * row.index for row in rows]
        elif name in _MASKS:
            address = [t.data_ptr() + t.element_size() * t.stride(0) * row.batch for row in rows]
            self._write(_MASKS[name].value, address, *t.stride()[1:])
        elif name in _ROW_VECTORS:
            t = t.float()
            t = t if t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()
            address = [t.data_ptr() + 4 * (t.stride(0) * row.batch + row.q_start) for row in rows]
            self._write(_ROW_VECTORS[name].value, address, t.stride(1), 1)
        else:
            far = name in ("k", "v") and problem.spec.direction == "forward" and t.stride(2) >= FARTHEST
            far &= not problem.spec.paged  # paged addresses have 64 bits in all steps
            t = t if (t.shape[-1] == 1 or t.stride(-1) == 1) and not far else t.contiguous()
            size = t.element_size()
            if problem.spec.paged and name in _PAGE_STRIDES:
                address = [t.data_ptr()] * len(rows)
                self.ints[:, _PAGE_STRIDES[name].value] = t.stride(0)
            else:
                start = [row.kv_start if name in _KEY_TENSORS else row.q_start for row in rows]
                address = [
                    t.data_ptr() + size * (t.stride(0) * row.batch + t.stride(2) * at)
                    for row, at in zip(rows, start, strict=True)
                ]
            # The stride of a dimension of size 1 is never used: write one that all loads and the copy engine accept.
            batch, head, row = (s if n > 1 else _VECTOR_BYTES for s, n in zip(t.stride()[:3], t.shape[:3], strict=True))
            self._write(_TENSORS[name].value, address, head, row)
            self.aligned &= all(n % _VECTOR_BYTES == 0 for n in (t.data_ptr(), size * batch, size * head, size * row))
            self.describable &= self.aligned and row > 0 and (head > 0 or name in _KEY_TENSORS)
        self.alive.append(t)

    def _write(self, column: int, address: list[int], *strides: int) -> None:
        self.ints[:, column] = address
        self.ints[:, column + 1 : column + 1 + len(strides)] = strides
