"""Where tiles lie: pointers to a head of a tensor, the stretches of keys that a block sees, and loads of rows."""

import triton
import triton.language as tl

from flashpoint_kernels.bounds import full_key_range_jit as full_key_range
from flashpoint_kernels.bounds import key_range_jit as key_range
from flashpoint_kernels.triton_backend import table as c


@triton.jit
def locate(t, TENSOR: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """(pointer to row 0 of head 0, stride of a head, stride of a row). `t` is the sequence's row of the table."""
    base = tl.load(t + TENSOR).to(tl.pointer_type(DTYPE))
    head_stride = tl.load(t + TENSOR + 1)
    row_stride = tl.load(t + TENSOR + 2)
    if ALIGNED:  # to 16 bytes, the widest load
        base = tl.multiple_of(base, 16)
        head_stride = tl.multiple_of(head_stride, 128 // DTYPE.primitive_bitwidth)
        row_stride = tl.multiple_of(row_stride, 128 // DTYPE.primitive_bitwidth)
    return base, head_stride, row_stride


@triton.jit
def locate_vector(t, VECTOR: tl.constexpr):
    """(pointer to row 0 of head 0, stride of a head) of `lse`, `delta` or `dlse`, float32."""
    return tl.load(t + VECTOR).to(tl.pointer_type(tl.float32)), tl.load(t + VECTOR + 1)


@triton.jit
def load_sequence(t, scalars, head):
    """What a program knows of its sequence and head: (t, scalars, head, scale, shape).

    `t` and `scalars` are its rows of the tables; shape is (q_len, kv_len, offset, left, right), int32, see bounds.py.
    """
    q_len = tl.load(t + c.Q_LEN).to(tl.int32)
    kv_len = tl.load(t + c.KV_LEN).to(tl.int32)
    offset = tl.load(t + c.OFFSET).to(tl.int32)
    shape = (q_len, kv_len, offset, tl.load(t + c.LEFT).to(tl.int32), tl.load(t + c.RIGHT).to(tl.int32))
    return t, scalars, head, tl.load(scalars + c.SCALE), shape


@triton.jit
def key_stretches(i0, shape, part_lo, part_hi, LEVEL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the keys in [part_lo, part_hi) that the block of queries at i0 goes through.

    Three stretches of whole tiles: [lo, full_lo) is cut by the left bound, [full_lo, full_hi) needs no visibility test,
    [full_hi, hi) is cut by the right bound or the end. At level 0 there is no left bound, and the first is empty.
    """
    q_len, kv_len, offset, left, right = shape
    i_last = tl.minimum(i0 + BLOCK_M, q_len) - 1
    lo, hi = key_range(i0, i_last, offset, left, right, kv_len)
    full_lo, full_hi = full_key_range(i0, i_last, offset, left, right, kv_len)
    lo = tl.maximum(lo // BLOCK_N * BLOCK_N, part_lo)
    hi = tl.where(i0 < q_len, tl.minimum(hi, part_hi), lo)  # a block of padding sees nothing
    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_lo, BLOCK_N) * BLOCK_N, lo), hi)
    if LEVEL == 0:
        full_lo = lo
    full_hi = tl.minimum(tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo), hi)
    return lo, full_lo, full_hi, hi


@triton.jit
def load_rows(base, stride, rows, count, dim, BLOCK_D: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """(len(rows), BLOCK_D): rows of a head; rows from `count` on and columns from `dim` on are 0.

    FULL: all rows are below `count`. EVEN: dim = BLOCK_D.
    """
    d = tl.arange(0, BLOCK_D)
    at = base + rows[:, None] * stride + d[None, :]
    if FULL and EVEN:
        block = tl.load(at)
    elif EVEN:
        block = tl.load(at, mask=rows[:, None] < count, other=0.0)
    elif FULL:
        block = tl.load(at, mask=d[None, :] < dim, other=0.0)
    else:
        block = tl.load(at, mask=(rows[:, None] < count) & (d[None, :] < dim), other=0.0)
    return block


@triton.jit
def store_rows(base, stride, rows, count, dim, block, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """Write (len(rows), BLOCK_D) where the row is below `count` and the column below `dim`."""
    d = tl.arange(0, BLOCK_D)
    inside = rows[:, None] < count
    if not EVEN:
        inside = inside & (d[None, :] < dim)
    tl.store(base + rows[:, None] * stride + d[None, :], block, mask=inside)
