"""The named groups in which constants and values travel through the kernels.

Triton takes a NamedTuple as a tuple with named fields, from 3.6 on. Make one by keyword: Triton's cache on disk goes by
the source of a kernel, which then says what each field is, whatever the order of the fields. `type` and `values` cannot
be fields, because Triton's tuples have attributes of these names.

Constants are the attributes of one constant. Triton 3.6 takes numbers, booleans and dtypes from there as arguments of
other functions, but no strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for. Constants that it does not use are None: it is compiled once for all their values.

    LEVEL is `Spec.level`; the dtypes are Triton's, of the tensors, the mask (None: no mask) and the mask's gradient.
    TF32 is for float32 operands alone. ALIGNED: every row of every head starts at a multiple of 16 bytes. A tile
    has BLOCK_M queries and BLOCK_N keys; head dimensions are padded to BLOCK_D, and those of values to BLOCK_DV. EVEN:
    they need no padding. STAGES: tiles of a tensor that are in shared memory at a time.
    """

    LEVEL: int | None = None
    DTYPE: Any = None
    MASK_DTYPE: Any = None
    DMASK_DTYPE: Any = None
    TF32: bool | None = None
    ALIGNED: bool | None = None
    BLOCK_M: int | None = None
    BLOCK_N: int | None = None
    BLOCK_D: int | None = None
    BLOCK_DV: int | None = None
    EVEN: bool | None = None
    STAGES: int | None = None


class Band(NamedTuple):
    """Lengths of a sequence, and which keys its queries may see (see bounds.py). int32."""

    q_len: Any
    kv_len: Any
    offset: Any
    left: Any
    right: Any


class Sequence(NamedTuple):
    """A sequence and one of its heads: its rows of the two tables (pointers), its scale, its band."""

    row: Any
    scalars: Any
    head: Any
    scale: Any
    band: Band


class Rows(NamedTuple):
    """Rows of a head of a tensor: `length` rows of `dim` numbers; row 0 is at `base`. Strides in elements."""

    base: Any
    head_stride: Any
    stride: Any
    length: Any
    dim: Any


class Softmax(NamedTuple):
    """The online softmax of a block of queries: running maximum m and denominator (M,), and the sum acc of P·V (M, Dv).

    m is in base 2. o = acc / denom, and lse = (m + log2 denom)·ln 2.
    """

    m: Any
    denom: Any
    acc: Any


class QueryBlock(NamedTuple):
    """A block of queries in the backward: the first query; q (M, D) and do (M, Dv); lse in base 2 and delta, (M,)."""

    i0: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
