"""Define named groups of constants and values, which kernels pass to functions.

From 3.6 on, Triton handles a NamedTuple as a tuple with named fields. Create one by keyword: then the kernel's source,
which is part of the key in Triton's disk cache, names each field, whatever their order. Fields cannot be named `type`
or `values`, because Triton's tuples have attributes with these names. A loop carries a NamedTuple like a tensor. A
number in a NamedTuple becomes a tensor when it is assigned, so constants for shapes and slices are separate arguments.

All constants are attributes of one constant, `Constants`. Triton 3.6 accepts its attributes as arguments of other
functions if they are numbers, booleans or dtypes, but not if they are strings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import triton.language as tl

# The ways to widen 8-bit keys: int8; float8_e4m3fn by the GPU's instruction; float8_e4m3fn by shifts of its bits.
INT8, FLOAT8, FLOAT8_BITS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@dataclass(frozen=True)
class Constants:
    """The constants of a compiled kernel. Those that a kernel does not use are None, so that they cause no compilation.

    - LEVEL is `Spec.level`.
    - DTYPE, MASK_DTYPE and DMASK_DTYPE are Triton's dtypes of the tensors, the mask (None: no mask) and its gradient.
    - TF32 is only for float32 operands.
    - ALIGNED: every row of every head starts at a multiple of 16 bytes.
    - BLOCK_M and BLOCK_N are the queries and keys of a tile.
    - BLOCK_D and BLOCK_DV are the padded head dimensions of keys and of values. The keys' may be the sum of two powers
      of two, BLOCK_D and BLOCK_REST, and in the backward the values' the sum of BLOCK_DV and BLOCK_DV_REST; otherwise
      the rest is 0 (see config.parts_of and config.gradient_parts_of).
    - RELOAD: a kernel of the backward loads an operand again before each product, so that shared memory holds the
      operands of one product at a time: all four of a wide head in float32 need more than some GPUs have.
    - EVEN: the head dimensions need no padding.
    - STAGES is the number of tiles of a tensor in shared memory at a time.
    - CARRY_FLOAT32: the loop of a kernel for Hopper passes P (in the kernel for dQ: dS) to its next iteration as
      float32 (see config.carries_float32).
    - PACKED: the rows of a block are the queries of all heads that share a key/value head (see Block).
    - PAGED: keys and values are pages.
    - KEYS says how 8-bit keys and values are widened (see tiles.widened); None if they have DTYPE.
    - BLOCKS: there is a block mask, and the tiles come from a list (see blocks.py).
    - STORE_DS: a kernel of dK or dV stores dS, from which another kernel computes dQ (see stored.py).
    - HOLD: that kernel, for Hopper, has its keys and values in registers, not in shared memory (see config.stores).
    - TWO_SETS: the forward for Hopper has two sets of descriptors, so that it makes those of a block while tiles of the
      previous block are copied.
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
    BLOCK_DV_REST: int | None = None
    RELOAD: bool | None = None
    EVEN: bool | None = None
    STAGES: int | None = None
    CARRY_FLOAT32: bool | None = None
    PACKED: bool | None = None
    PAGED: bool | None = None
    KEYS: int | None = None
    BLOCKS: bool | None = None
    STORE_DS: bool | None = None
    HOLD: bool | None = None
    TWO_SETS: bool | None = None

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # cached, because Triton hashes the constants in each launch


class Band(NamedTuple):
    """The lengths of a sequence, and the keys that its queries may see (see bounds.py). int32."""

    q_len: Any
    kv_len: Any
    offset: Any
    left: Any
    right: Any


class Sequence(NamedTuple):
    """A sequence and one of its heads.

    `row` and `scalars` are pointers to the sequence's rows in the int64 and the float32 table (see columns.py), `scale`
    is the factor of its scores, and `band` its Band. In a packed block `head` is (M, 1).
    """

    row: Any
    scalars: Any
    head: Any
    scale: Any
    band: Band


class Block(NamedTuple):
    """A block of queries, with one element per row in `queries` (M,) int32 and in `heads`.

    `heads` is a scalar if all rows have the same head. `first` and `last` are the block's first and last query,
    `kv_head` is the head of its keys. In a packed block row r is query r // group of head r % group: all heads that
    share a key head read its keys once (FlashAttention's `pack_gqa`).
    """

    queries: Any
    heads: Any
    first: Any
    last: Any
    kv_head: Any


class Rows(NamedTuple):
    """The rows of one head of a tensor: `length` rows of `dim` numbers; row 0 is at `base`. Strides in elements.

    In a packed block `base` is (M, 1): each row has its own head.
    """

    base: Any
    head_stride: Any
    stride: Any
    length: Any
    dim: Any


class Keys(NamedTuple):
    """The keys or values of a key head: their Rows, and the address and strides of their float32 scales.

    `page` is the stride of a page, 0 without pages. Without scales the last three fields are 0.
    """

    rows: Rows
    page: Any
    p_scale: Any
    scale_row: Any
    scale_page: Any


class Pages(NamedTuple):
    """The pages of a sequence.

    `numbers` is the address of the page numbers, `size` the number of keys of a page, `inverse` ⌊(2³² − 1) / size⌋, and
    `pool` the number of pages in the pool. `size` and `inverse` are uint32, and `pool` is int32.
    """

    numbers: Any
    size: Any
    inverse: Any
    pool: Any


class KeyTile(NamedTuple):
    """The position of a tile of N keys.

    `first` is the tile's first key; `page`, `row` and `valid`, (N,), are each key's page number, its row in the page,
    and whether to read it. Without pages only `first` and `row`, the key's index, are used.
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


class Queries(NamedTuple):
    """A block of queries in the forward: indices (M,) and q (M, D); with BLOCK_REST, `rest` has q's last columns."""

    queries: Any
    q: Any
    rest: Any


class KeysAndValues(NamedTuple):
    """The keys and values that a block of queries reads: as Keys, or in the backward as Rows.

    `pages` are the Pages of the forward; 0 in the backward, which has no pages. With a block mask `listed` is the
    block's list of tiles (see blocks.py), otherwise 0.
    """

    k: Any
    v: Any
    pages: Any
    listed: Any


class QueryBlock(NamedTuple):
    """A block of queries in the backward: indices (M,); q (M, D) and do (M, Dv); lse in base 2 and delta, both (M,).

    `rest` and `do_rest` are the last columns of q and of do, if they are in two parts; `q_rows` and `do_rows` are the
    Rows from which a block with RELOAD is loaded again.
    """

    queries: Any
    q: Any
    rest: Any
    do: Any
    do_rest: Any
    lse: Any
    delta: Any
    q_rows: Any
    do_rows: Any


class Stored(NamedTuple):
    """The stored dSᵀ of a head: pointer to its first number, and the strides, in elements, of a head and of QUERIES."""

    base: Any
    head: Any
    row: Any
