"""Where tiles lie: the rows of a head of a tensor, and the keys that a block sees. Loads and stores of rows."""

import triton
import triton.language as tl

from flashpoint_kernels.bounds import full_key_range_jit as full_key_range
from flashpoint_kernels.bounds import key_range_jit as key_range
from flashpoint_kernels.triton_backend import table as col
from flashpoint_kernels.triton_backend.groups import Band, Block, Rows, Sequence


@triton.jit
def locate(t, TENSOR: tl.constexpr, C: tl.constexpr):
    """(pointer to row 0 of head 0, stride of a head, stride of a row). `t` is the sequence's row of the table."""
    base = tl.load(t + TENSOR).to(tl.pointer_type(C.DTYPE))
    head_stride = tl.load(t + TENSOR + 1)
    row_stride = tl.load(t + TENSOR + 2)
    if C.ALIGNED:  # to 16 bytes, the widest load
        base = tl.multiple_of(base, 16)
        head_stride = tl.multiple_of(head_stride, 128 // C.DTYPE.primitive_bitwidth)
        row_stride = tl.multiple_of(row_stride, 128 // C.DTYPE.primitive_bitwidth)
    return base, head_stride, row_stride


@triton.jit
def rows_of(t, TENSOR: tl.constexpr, head, length, dim, C: tl.constexpr):
    """The Rows of a head of a tensor."""
    base, head_stride, stride = locate(t, TENSOR, C)
    return Rows(base=base + head * head_stride, head_stride=head_stride, stride=stride, length=length, dim=dim)


@triton.jit
def next_head(rows, nth):
    """The Rows of the nth head after."""
    return Rows(
        base=rows.base + nth * rows.head_stride, head_stride=rows.head_stride, stride=rows.stride,
        length=rows.length, dim=rows.dim,
    )  # fmt: skip


@triton.jit
def block_at(start, nth, group, C: tl.constexpr):
    """The Block whose first row is `start`: of query head `nth`, or packed, of all query heads of key head `nth`."""
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
    """The heads of a block as they meet its rows of columns: (M, 1), or the one head."""
    if C.PACKED:
        heads = block.heads[:, None]
    else:
        heads = block.heads
    return heads


@triton.jit
def locate_vector(t, VECTOR: tl.constexpr):
    """(pointer to row 0 of head 0, stride of a head) of `lse`, `dlse` or the stats, float32."""
    return tl.load(t + VECTOR).to(tl.pointer_type(tl.float32)), tl.load(t + VECTOR + 1)


@triton.jit
def load_sequence(t, scalars, head):
    """The Sequence of a head. `t` and `scalars` are the sequence's rows of the two tables."""
    q_len = tl.load(t + col.Q_LEN).to(tl.int32)
    kv_len = tl.load(t + col.KV_LEN).to(tl.int32)
    offset = tl.load(t + col.OFFSET).to(tl.int32)
    left = tl.load(t + col.LEFT).to(tl.int32)
    right = tl.load(t + col.RIGHT).to(tl.int32)
    band = Band(q_len=q_len, kv_len=kv_len, offset=offset, left=left, right=right)
    return Sequence(row=t, scalars=scalars, head=head, scale=tl.load(scalars + col.SCALE), band=band)


@triton.jit
def key_stretches(first, last, band, part_lo, part_hi, C: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the keys in [part_lo, part_hi) that queries `first` to `last` go through.

    Three stretches of whole tiles: [lo, full_lo) is cut by the left bound, [full_lo, full_hi) needs no visibility test,
    [full_hi, hi) is cut by the right bound or the end. At level 0 there is no left bound, and the first is empty.
    """
    last = tl.minimum(last, band.q_len - 1)
    lo, hi = key_range(first, last, band.offset, band.left, band.right, band.kv_len)
    full_lo, full_hi = full_key_range(first, last, band.offset, band.left, band.right, band.kv_len)
    lo = tl.maximum(lo // C.BLOCK_N * C.BLOCK_N, part_lo)
    hi = tl.where(first < band.q_len, tl.minimum(hi, part_hi), lo)  # a block of padding sees nothing
    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_lo, C.BLOCK_N) * C.BLOCK_N, lo), hi)
    if C.LEVEL == 0:
        full_lo = lo
    full_hi = tl.minimum(tl.maximum(full_hi // C.BLOCK_N * C.BLOCK_N, full_lo), hi)
    return lo, full_lo, full_hi, hi


@triton.jit
def load(rows, o, BLOCK_D: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """(len(o), BLOCK_D): the rows `o`; beyond the last row and the last column it is 0.

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
def store(rows, o, block, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """Write `block` (len(o), BLOCK_D) to the rows `o`, none beyond the last row and the last column."""
    o_d = tl.arange(0, BLOCK_D)
    m_rows = o[:, None] < rows.length
    if not EVEN:
        m_rows = m_rows & (o_d[None, :] < rows.dim)
    tl.store(rows.base + o[:, None] * rows.stride + o_d[None, :], block, mask=m_rows)
