"""Gradients of what all rows share: the additive mask and the sinks. No atomics; notation as in backward.py.

dmask = Σ dS over the mask's broadcast dimensions          one program a tile of the mask itself
dsink = −Σ exp(sink − lse)·delta over queries and batch    one program a head
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend import table as c
from flashpoint_kernels.triton_backend.backward import dropout_factor, load_stats
from flashpoint_kernels.triton_backend.interpret import cast, dot
from flashpoint_kernels.triton_backend.scores import LOG2E, modify, probabilities, visible
from flashpoint_kernels.triton_backend.tiles import load_rows, load_sequence, locate, locate_vector

# Columns of a work item: first table row and how many of them (the batch) to sum over, first head and how many heads,
# queries [m_lo, m_hi) and keys [n_lo, n_hi): one tile of the mask, or all tiles of a dimension that is summed over.
MASK_ITEM = tl.constexpr(8)


@triton.jit(do_not_specialize=["head_dim", "value_dim"])
def attention_backward_mask(
    table, floats, items, head_dim, value_dim,
    DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, DMASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of dmask, summed over batch, heads, queries and keys as far as the mask is broadcast over them."""
    item = items + tl.program_id(0) * MASK_ITEM
    first, batch = tl.load(item).to(tl.int64), tl.load(item + 1)
    first_head, heads = tl.load(item + 2), tl.load(item + 3)
    m_lo, m_hi = tl.load(item + 4), tl.load(item + 5)
    n_lo, n_hi = tl.load(item + 6), tl.load(item + 7)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(0, batch):
        t = table + (first + b) * c.WIDTH
        scalars = floats + (first + b) * c.SCALARS
        q_len = tl.load(t + c.Q_LEN).to(tl.int32)
        kv_len = tl.load(t + c.KV_LEN).to(tl.int32)
        group = tl.load(t + c.GROUP).to(tl.int32)
        for head in range(first_head, first_head + heads):
            seq = load_sequence(t, scalars, head)
            q_base, q_head, q_stride = locate(t, c.Q, DTYPE, ALIGNED)
            q_base += head * q_head
            do_base, do_head, do_stride = locate(t, c.DO, DTYPE, ALIGNED)
            do_base += head * do_head
            k_base, k_head, k_stride = locate(t, c.K, DTYPE, ALIGNED)
            k_base += head // group * k_head
            v_base, v_head, v_stride = locate(t, c.V, DTYPE, ALIGNED)
            v_base += head // group * v_head
            stats_base, stats_head = locate_vector(t, c.STATS)
            for i0 in range(m_lo, tl.minimum(m_hi, q_len), BLOCK_M):
                o_m = i0 + tl.arange(0, BLOCK_M)
                q = load_rows(q_base, q_stride, o_m, q_len, head_dim, BLOCK_D, False, EVEN)  # (M, D)
                do = load_rows(do_base, do_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN)  # (M, Dv)
                lse, delta = load_stats(stats_base + head * stats_head, stats_head // 2, o_m)
                for j0 in range(n_lo, tl.minimum(n_hi, kv_len), BLOCK_N):
                    o_n = j0 + tl.arange(0, BLOCK_N)
                    k = load_rows(k_base, k_stride, o_n, kv_len, head_dim, BLOCK_D, False, EVEN)  # (N, D)
                    v = load_rows(v_base, v_stride, o_n, kv_len, value_dim, BLOCK_DV, False, EVEN)  # (N, Dv)
                    s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)  # (M, N)
                    s, _ = modify(s, o_m[:, None], o_n[None, :], seq, 2, MASK_DTYPE)
                    seen = visible(o_m[:, None], j0, tl.arange(0, BLOCK_N)[None, :], seq[4], 2)
                    p = tl.where(seen, probabilities(s, lse[:, None]), 0.0)
                    dp = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)  # (M, N)
                    dp = dp * dropout_factor(i0, j0, seq, BLOCK_M, BLOCK_N)
                    total += p * (dp - delta[:, None])  # the mask is added to the transformed score: no slope
    t = table + first * c.WIDTH
    base = tl.load(t + c.DMASK).to(tl.pointer_type(DMASK_DTYPE)) + first_head * tl.load(t + c.DMASK + 1)
    row_stride, column_stride = tl.load(t + c.DMASK + 2), tl.load(t + c.DMASK + 3)
    o_m = m_lo + tl.arange(0, BLOCK_M)
    o_n = n_lo + tl.arange(0, BLOCK_N)
    q_rows, kv_rows = tl.load(t + c.Q_ROWS).to(tl.int32), tl.load(t + c.KV_ROWS).to(tl.int32)
    # A stride of 0 marks a dimension that was summed over: its sum stands in the tile's first row or column alone.
    if row_stride == 0:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + tl.sum(total, 0)[None, :]
        q_rows = m_lo + 1
    if column_stride == 0:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + tl.sum(total, 1)[:, None]
        kv_rows = n_lo + 1
    at = base + o_m[:, None] * row_stride + o_n[None, :] * column_stride
    tl.store(at, cast(total, DMASK_DTYPE), mask=(o_m[:, None] < q_rows) & (o_n[None, :] < kv_rows))


# Columns of a work item: first table row of a problem and how many rows it has.
SINK_ITEM = tl.constexpr(2)


@triton.jit(do_not_specialize=["heads"])
def attention_backward_sinks(table, items, heads, BLOCK_M: tl.constexpr):
    """dsinks of one head of one problem, float32. Grid: items × heads."""
    item = items + (tl.program_id(0) // heads) * SINK_ITEM
    head = tl.program_id(0) % heads
    first, batch = tl.load(item).to(tl.int64), tl.load(item + 1)
    t = table + first * c.WIDTH
    if head >= tl.load(t + c.HEADS):
        return
    sink = tl.load(tl.load(t + c.SINKS).to(tl.pointer_type(tl.float32)) + head) * LOG2E
    total = tl.zeros([BLOCK_M], tl.float32)
    for b in range(0, batch):
        row = t + b * c.WIDTH
        q_len = tl.load(row + c.Q_LEN).to(tl.int32)
        stats_base, stats_head = locate_vector(row, c.STATS)
        for i0 in range(0, q_len, BLOCK_M):
            o_m = i0 + tl.arange(0, BLOCK_M)
            lse, delta = load_stats(stats_base + head * stats_head, stats_head // 2, o_m)
            total -= tl.exp2(sink - lse) * delta
    tl.store(tl.load(t + c.DSINKS).to(tl.pointer_type(tl.float32)) + head, tl.sum(total, 0))
