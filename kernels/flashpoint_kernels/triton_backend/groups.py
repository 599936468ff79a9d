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

import triton.language as tl

# How 8-bit keys and values are widened: float8_e4m3fn by the chip, or by moving its bits.
INT8, FLOAT8, FLOAT8_BITS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@dataclass(frozen=True)
class Constants:
    """The constants of a compiled kernel. Those it does not use are None: it is compiled once for all their values.

    LEVEL is `Spec.level`; the dtypes are Triton's, of the tensors, the mask (None: no mask) and the mask's gradient.
    TF32 is for float32 operands alone. ALIGNED: every row of every head starts at a multiple of 16 bytes. A tile
    has BLOCK_M queries and BLOCK_N keys; head dimensions are padded to BLOCK_D, and those of values to BLOCK_DV. In the
    forward a head dimension may be the sum of two powers of two, BLOCK_D and BLOCK_REST, which else is 0 (see
    config.parts_of). EVEN: they need no padding. STAGES: tiles of a tensor that are in shared memory at a time. PACKED:
    the rows of a block are the queries of all heads that share a key/value head (see Block). PAGED: keys and values are
    pages. KEYS: how keys and values that are 8-bit numbers are widened (see tiles.widened), None where they have DTYPE.
    BLOCKS: there is a block mask, and the tiles are those of a list (see blocks.py).
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
    BLOCK_REST: int | None = None
    BLOCK_DV: int | None = None
    EVEN: bool | None = None
    STAGES: int | None = None
    PACKED: bool | None = None
    PAGED: bool | None = None
    KEYS: int | None = None
    BLOCKS: bool | None = None


class Band(NamedTuple):
    """Lengths of a sequence, and which keys its queries may see (see bounds.py). int32."""

    q_len: Any
    kv_len: Any
    offset: Any
    left: Any
    right: Any


class Sequence(NamedTuple):
    """A sequence and one of its heads: its rows of the two tables (pointers), its scale, its band.

    In a packed block `head` is (M, 1).
    """

    row: Any
    scalars: Any
    head: Any
    scale: Any
    band: Band


class Block(NamedTuple):
    """A block of queries. `queries` and `heads` are those of each row: (M,) int32, `heads` a number where all have one.

    `first` and `last` are its first and last query, `kv_head` the head of its keys. In a packed block row r is query
    r // group of head r % group: all heads that share a key head read its keys once (FlashAttention's `pack_gqa`).
    """

    queries: Any
    heads: Any
    first: Any
    last: Any
    kv_head: Any


class Rows(NamedTuple):
    """Rows of a head of a tensor: `length` rows of `dim` numbers; row 0 is at `base`. Strides in elements.

    In a packed block `base` is (M, 1): each row has its own head.
    """

    base: Any
    head_stride: Any
    stride: Any
    length: Any
    dim: Any


class Keys(NamedTuple):
    """Keys, or values, of a key head: their Rows, the stride of a page, and where their scales are, float32.

    Without pages `page` is 0, and without scales the last three.
    """

    rows: Rows
    page: Any
    p_scale: Any
    scale_row: Any
    scale_page: Any


class Places(NamedTuple):
    """Where a tile of keys (N,) is: its page, the row there, and whether it may be read; the tile's first key.

    Without pages, `first` and `row` alone.
    """

    first: Any
    page: Any
    row: Any
    valid: Any


class Softmax(NamedTuple):
    """The online softmax of a block of queries: running maximum m and denominator (M,), and the sum acc of P·V (M, Dv).

    m is in base 2. o = acc / denom, and lse = (m + log2 denom)·ln 2.
    """

    m: Any
    denom: Any
    acc: Any


class QueryBlock(NamedTuple):
    """A block of queries in the backward: the queries (M,); q (M, D) and do (M, Dv); lse in base 2 and delta, (M,)."""

    queries: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
