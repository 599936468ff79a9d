"""Where tiles lie: pointers to a head of a tensor, and loads of a block of its rows."""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend import table as c


@triton.jit
def head_base(t, TENSOR: tl.constexpr, head, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to row 0 of one head, and the stride of a row. `t` is the sequence's row of the table (table.py)."""
    base = tl.load(t + TENSOR).to(tl.pointer_type(DTYPE)) + head * tl.load(t + TENSOR + 1)
    stride = tl.load(t + TENSOR + 2)
    if ALIGNED:  # 16 bytes: the widest load
        base = tl.multiple_of(base, 16)
        stride = tl.multiple_of(stride, 128 // DTYPE.primitive_bitwidth)
    return base, stride


@triton.jit
def load_shape(t):
    """A sequence's lengths and band of visible keys, int32: (q_len, kv_len, offset, left, right), see bounds.py."""
    q_len = tl.load(t + c.Q_LEN).to(tl.int32)
    kv_len = tl.load(t + c.KV_LEN).to(tl.int32)
    offset = tl.load(t + c.OFFSET).to(tl.int32)
    return q_len, kv_len, offset, tl.load(t + c.LEFT).to(tl.int32), tl.load(t + c.RIGHT).to(tl.int32)


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
def store_rows(base, stride, rows, count, dim, block, BLOCK_D: tl.constexpr):
    """Write (len(rows), BLOCK_D) where the row is below `count` and the column below `dim`."""
    d = tl.arange(0, BLOCK_D)
    tl.store(base + rows[:, None] * stride + d[None, :], block, mask=(rows[:, None] < count) & (d[None, :] < dim))


@triton.jit
def load_vector(t, VECTOR: tl.constexpr, head, rows, count, other):
    """(len(rows),) float32 of `lse`, `delta` or `dlse`; rows from `count` on are `other`."""
    base = tl.load(t + VECTOR).to(tl.pointer_type(tl.float32)) + head * tl.load(t + VECTOR + 1)
    return tl.load(base + rows, mask=rows < count, other=other)
