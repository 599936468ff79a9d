"""Where tiles lie: pointers to a head of a tensor, and loads of a block of its rows."""

import triton
import triton.language as tl

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
