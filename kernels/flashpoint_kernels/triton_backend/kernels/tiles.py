"""Locate tiles (the rows of a head of a tensor, and the keys that a block sees), and load and store rows."""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.bounds import full_key_range, key_range
from flashpoint_kernels.triton_backend.kernels.groups import (
    FLOAT8,
    INT8,
    Band,
    Block,
    Keys,
    KeyTile,
    Pages,
    Rows,
    Sequence,
    Stored,
)

QUERIES = tl.constexpr(64)  # of a block of stored dS


@triton.jit
def locate(t, TENSOR: tl.constexpr, DTYPE: tl.constexpr, C: tl.constexpr):
    """Return (pointer to row 0 of head 0, stride of a head, stride of a row).

    `t` is the sequence's row of the table.
    """
    base = tl.load(t + TENSOR).to(tl.pointer_type(DTYPE))
    head_stride = tl.load(t + TENSOR + 1)
    row_stride = tl.load(t + TENSOR + 2)
    if C.ALIGNED:  # aligned to 16 bytes, the widest load
        base = tl.multiple_of(base, 16)
        head_stride = tl.multiple_of(head_stride, 128 // DTYPE.primitive_bitwidth)
        row_stride = tl.multiple_of(row_stride, 128 // DTYPE.primitive_bitwidth)
    return base, head_stride, row_stride


@triton.jit
def rows_of(t, TENSOR: tl.constexpr, head, length, dim, C: tl.constexpr):
    """Return the Rows of a head of a tensor."""
    base, head_stride, stride = locate(t, TENSOR, C.DTYPE, C)
    return Rows(base=base + head * head_stride, head_stride=head_stride, stride=stride, length=length, dim=dim)


@triton.jit
def keys_of(t, TENSOR: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr, head, length, dim, C: tl.constexpr):
    """Return the Keys of a key/value head: its keys if TENSOR is K, or its values."""
    DTYPE: tl.constexpr = C.DTYPE if C.KEYS is None else tl.int8
    base, head_stride, stride = locate(t, TENSOR, DTYPE, C)
    rows = Rows(base=base + head * head_stride, head_stride=head_stride, stride=stride, length=length, dim=dim)
    page, p_scale, scale_row, scale_page = 0, 0, 0, 0
    if C.PAGED:
        page = tl.load(t + PAGE)
        if C.ALIGNED:
            page = tl.multiple_of(page, 128 // DTYPE.primitive_bitwidth)
    if C.KEYS is not None:
        p_scale = tl.load(t + SCALE).to(tl.pointer_type(tl.float32)) + head * tl.load(t + SCALE + 1)
        scale_row, scale_page = tl.load(t + SCALE + 2), tl.load(t + SCALE + 3)
    return Keys(rows=rows, page=page, p_scale=p_scale, scale_row=scale_row, scale_page=scale_page)


@triton.jit
def pages_of(t, C: tl.constexpr):
    """Return the Pages of the sequence in row `t` of the table; without pages, all fields are 0.

    Call this before a loop over tiles, not in it: Triton prefetches a tile only if its address needs at most one other
    load.
    """
    numbers, size, inverse, pool = 0, 0, 0, 0
    if C.PAGED:
        numbers = tl.load(t + col.PAGES).to(tl.pointer_type(tl.int32))
        size = tl.load(t + col.PAGE_SIZE).to(tl.uint32)
        inverse = tl.full([], 0xFFFFFFFF, tl.uint32) // size
        pool = tl.load(t + col.POOL).to(tl.int32)
    return Pages(numbers=numbers, size=size, inverse=inverse, pool=pool)


@triton.jit
def places_of(j0, pages, kv_len, C: tl.constexpr):
    """Return the KeyTile that begins at key j0. Its `valid` is false for keys whose page number is outside the pool.

    The quotient o_n // size is computed as the upper half of o_n·⌊(2³² − 1) / size⌋, which is at most one too small and
    is then corrected. This takes a quarter of the instructions of a division.
    """
    o_n = j0 + tl.arange(0, C.BLOCK_N)
    page, row, valid = 0, o_n, 0
    if C.PAGED:
        number = o_n.to(tl.uint32)
        nth = tl.umulhi(number, pages.inverse)
        row = number - nth * pages.size
        low = row >= pages.size
        nth = tl.where(low, nth + 1, nth)
        row = tl.where(low, row - pages.size, row).to(tl.int32)
        valid = o_n < kv_len
        page = tl.load(pages.numbers + nth, mask=valid, other=0)
        valid = valid & (page >= 0) & (page < pages.pool)
    return KeyTile(first=j0, page=page, row=row, valid=valid)


@triton.jit
def unsigned(numbers):
    """Return non-negative 32-bit numbers as uint64: multiplying them by a stride takes fewer instructions."""
    return numbers.to(tl.uint32).to(tl.uint64)


@triton.jit
def load_keys(keys, places, BLOCK_D: tl.constexpr, FULL: tl.constexpr, C: tl.constexpr):
    """Return keys or values at `places`, (N, BLOCK_D), as they are stored: 8-bit numbers are not widened or scaled.

    For FULL see `load`.
    """
    if C.PAGED:
        o_d = tl.arange(0, BLOCK_D)
        row = unsigned(places.row) * keys.rows.stride.to(tl.uint64)
        o_k = unsigned(places.page) * keys.page.to(tl.uint64) + row
        m_k = places.valid[:, None]
        if not C.EVEN:
            m_k = m_k & (o_d[None, :] < keys.rows.dim)
        block = tl.load(keys.rows.base + o_k[:, None] + o_d[None, :], mask=m_k, other=0)
    else:
        # `load_tile` keeps 32-bit offsets in registers. Without EVEN, the mask of the columns needs these registers.
        if C.EVEN:
            block = load_tile(keys.rows, places.first, places.row, BLOCK_D, FULL, C)
        else:
            block = load(keys.rows, places.row, BLOCK_D, FULL, C.EVEN)
    return block


@triton.jit
def load_scales(keys, places, FULL: tl.constexpr, C: tl.constexpr):
    """Return the scales of keys or values, (N,) float32; 0 where there is no key."""
    if C.PAGED:
        row = unsigned(places.row) * keys.scale_row.to(tl.uint64)
        p = keys.p_scale + (unsigned(places.page) * keys.scale_page.to(tl.uint64) + row)
        scales = tl.load(p, mask=places.valid, other=0.0)
    else:
        p = keys.p_scale + places.row * keys.scale_row
        scales = tl.load(p) if FULL else tl.load(p, mask=places.row < keys.rows.length, other=0.0)
    return scales


@triton.jit
def widened(block, C: tl.constexpr):
    """Return 8-bit numbers converted to float32, exactly.

    A GPU from sm_89 on converts float8_e4m3fn itself. For others (FLOAT8_BITS) the bits are moved to the sign, exponent
    and mantissa of a float16, whose exponent has a bias larger by 8.
    """
    if C.KEYS == INT8:
        wide = block.to(tl.float32)
    elif C.KEYS == FLOAT8:
        wide = block.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        bits = block.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide)
    return wide


@triton.jit
def next_head(rows, nth):
    """Return the Rows of the nth head after the head of `rows`."""
    return Rows(
        base=rows.base + nth * rows.head_stride, head_stride=rows.head_stride, stride=rows.stride,
        length=rows.length, dim=rows.dim,
    )  # fmt: skip


@triton.jit
def columns_from(rows, first: tl.constexpr):
    """Return the Rows without the columns before `first`."""
    return Rows(
        base=rows.base + first, head_stride=rows.head_stride, stride=rows.stride, length=rows.length,
        dim=rows.dim - first,
    )  # fmt: skip


@triton.jit
def load_again(block, rows, o, BLOCK_D: tl.constexpr, C: tl.constexpr):
    """Return `block`, the rows `o` of up to BLOCK_D columns; with RELOAD, load it once more (see groups.Constants)."""
    if C.RELOAD:
        o_d = tl.arange(0, BLOCK_D)
        m_rows = o[:, None] < rows.length
        if not C.EVEN:
            m_rows = m_rows & (o_d[None, :] < rows.dim)
        # `volatile` prevents Triton from using the earlier load, and from moving this one out of a loop.
        p = rows.base + o[:, None] * rows.stride + o_d[None, :]
        block = tl.load(p, mask=m_rows, other=0.0, volatile=True)
    return block


@triton.jit
def load_rest(rows, o, first: tl.constexpr, REST: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Return the columns of the rows `o` from `first` on, (len(o), REST), like `load`; 0 if REST is 0."""
    block = 0
    if REST:
        block = load(columns_from(rows, first), o, REST, FULL, EVEN)
    return block


@triton.jit
def store_rest(rows, o, block, first: tl.constexpr, REST: tl.constexpr, EVEN: tl.constexpr):
    """Store `block` (len(o), REST) to the columns of the rows `o` from `first` on, like `store`; REST may be 0."""
    if REST:
        store(columns_from(rows, first), o, block, REST, EVEN)


@triton.jit
def block_at(start, nth, group, C: tl.constexpr):
    """Return the Block from row `start` on: of query head `nth`, or if packed, of the query heads of key head `nth`."""
    o_r = start + tl.arange(0, C.BLOCK_M)
    if C.PACKED:
        block = Block(
            queries=o_r // group, heads=nth * group + o_r % group, first=start // group,
            last=(start + C.BLOCK_M - 1) // group, kv_head=nth,
        )  # fmt: skip
    else:
        block = Block(queries=o_r, heads=nth, first=start, last=start + C.BLOCK_M - 1, kv_head=nth // group)
    return block


@triton.jit
def heads_column(block, C: tl.constexpr):
    """Return the heads of a block, in a shape that broadcasts to its rows: (M, 1), or one number."""
    if C.PACKED:
        heads = block.heads[:, None]
    else:
        heads = block.heads
    return heads


@triton.jit
def locate_vector(t, VECTOR: tl.constexpr):
    """Return (pointer to row 0 of head 0, stride of a head) of a float32 vector.

    VECTOR is the table column of `lse`, `dlse`, or `stats` (the output of `attention_delta`).
    """
    return tl.load(t + VECTOR).to(tl.pointer_type(tl.float32)), tl.load(t + VECTOR + 1)


@triton.jit
def load_sequence(t, scalars, head):
    """Return the Sequence of a head. `t` and `scalars` are the sequence's rows of the int64 and the float32 table."""
    q_len = tl.load(t + col.Q_LEN).to(tl.int32)
    kv_len = tl.load(t + col.KV_LEN).to(tl.int32)
    offset = tl.load(t + col.OFFSET).to(tl.int32)
    left = tl.load(t + col.LEFT).to(tl.int32)
    right = tl.load(t + col.RIGHT).to(tl.int32)
    band = Band(q_len=q_len, kv_len=kv_len, offset=offset, left=left, right=right)
    return Sequence(row=t, scalars=scalars, head=head, scale=tl.load(scalars + col.SCALE), band=band)


@triton.jit
def key_stretches(first, last, band, part_lo, part_hi, C: tl.constexpr):
    """Return (lo, full_lo, full_hi, hi): the keys in [part_lo, part_hi) that queries `first` to `last` need.

    There are three stretches of whole tiles. The left bound cuts [lo, full_lo); [full_lo, full_hi) needs no visibility
    test; the right bound or the end cuts [full_hi, hi). Level 0 has no left bound, so its first stretch is empty.
    """
    last = tl.minimum(last, band.q_len - 1)
    lo, hi = key_range(first, last, band.offset, band.left, band.right, band.kv_len)
    full_lo, full_hi = full_key_range(first, last, band.offset, band.left, band.right, band.kv_len)
    lo = tl.maximum(lo // C.BLOCK_N * C.BLOCK_N, part_lo)
    hi = tl.where(first < band.q_len, tl.minimum(hi, part_hi), lo)  # a block that has only padding sees nothing
    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_lo, C.BLOCK_N) * C.BLOCK_N, lo), hi)
    if C.LEVEL == 0:
        full_lo = lo
    full_hi = tl.minimum(tl.maximum(full_hi // C.BLOCK_N * C.BLOCK_N, full_lo), hi)
    return lo, full_lo, full_hi, hi


@triton.jit
def load(rows, o, BLOCK_D: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Return the rows `o` as (len(o), BLOCK_D), with 0 beyond the last row and the last column.

    FULL: all rows are below `rows.length`. EVEN: `rows.dim` = BLOCK_D.
    """
    o_d = tl.arange(0, BLOCK_D)
    p = rows.base + o[:, None] * rows.stride + o_d[None, :]
    if FULL and EVEN:
        block = tl.load(p)
    elif EVEN:
        block = tl.load(p, mask=o[:, None] < rows.length, other=0.0)
    elif FULL:
        block = tl.load(p, mask=o_d[None, :] < rows.dim, other=0.0)
    else:
        block = tl.load(p, mask=(o[:, None] < rows.length) & (o_d[None, :] < rows.dim), other=0.0)
    return block


@triton.jit
def load_tile(rows, first, o, BLOCK_D: tl.constexpr, FULL: tl.constexpr, C: tl.constexpr):
    """Return the rows of a tile of keys, o = first + (0, 1, …), like `load` with EVEN.

    Offsets from the tile's address have 32 bits, and are the same for all tiles: the stride between keys must be less
    than `table.FARTHEST`.
    """
    o_d = tl.arange(0, BLOCK_D)
    step = rows.stride.to(tl.uint32)
    if C.ALIGNED:
        step = tl.multiple_of(step, 128 // rows.base.dtype.element_ty.primitive_bitwidth)
    within = tl.arange(0, C.BLOCK_N).to(tl.uint32)[:, None] * step + o_d[None, :]
    p = rows.base + tl.cast(first, tl.uint32).to(tl.uint64) * step.to(tl.uint64) + within
    if FULL:
        block = tl.load(p)
    else:
        block = tl.load(p, mask=o[:, None] < rows.length, other=0.0)
    return block


@triton.jit
def store(rows, o, block, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """Store `block` (len(o), BLOCK_D) to the rows `o`, without elements beyond the last row or the last column."""
    o_d = tl.arange(0, BLOCK_D)
    m_rows = o[:, None] < rows.length
    if not EVEN:
        m_rows = m_rows & (o_d[None, :] < rows.dim)
    tl.store(rows.base + o[:, None] * rows.stride + o_d[None, :], block, mask=m_rows)


@triton.jit
def stored_of(t, head, C: tl.constexpr):
    """Return the Stored of a query head."""
    stride = tl.load(t + col.DS + 1)
    base = tl.load(t + col.DS).to(tl.pointer_type(C.DTYPE)) + head * stride
    return Stored(base=tl.multiple_of(base, 16), head=stride, row=tl.load(t + col.DS + 2))


@triton.jit
def next_stored(stored, nth):
    """Return the Stored of the nth head after the head of `stored`."""
    return Stored(base=stored.base + nth * stored.head, head=stored.head, row=stored.row)


@triton.jit
def places_of_ds(stored, i0, j0, C: tl.constexpr):
    """Return the addresses of a tile of dS, (M, N): queries from i0 on, and keys from j0 on.

    A row has a query's dS of all keys. hopper/stored.py divides the same memory into tiles of dSᵀ.
    """
    stride = tl.multiple_of((stored.row // QUERIES).to(tl.int32), 128)
    first = stored.base + (tl.cast(i0, tl.int64) * stride + j0)
    return tl.multiple_of(first, 16) + (tl.arange(0, C.BLOCK_M)[:, None] * stride + tl.arange(0, C.BLOCK_N)[None, :])
