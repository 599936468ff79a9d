"""Gradients of inputs that several rows share: the additive mask and the sinks.

There are no atomics. The notation is that of backward.py.

dmask = Σ dS over the mask's broadcast dimensions          one program per tile of the mask
dsink = −Σ exp(sink − lse)·delta over queries and batch    one program per head
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.backward import dropout_factor, load_stats, rows_times_rows
from flashpoint_kernels.triton_backend.kernels.blocks import tile_is_seen, unskipped
from flashpoint_kernels.triton_backend.kernels.groups import QueryBlock
from flashpoint_kernels.triton_backend.kernels.interpret import cast
from flashpoint_kernels.triton_backend.kernels.scores import LOG2E, modify, probabilities, visible
from flashpoint_kernels.triton_backend.kernels.tiles import (
    load,
    load_again,
    load_rest,
    load_sequence,
    locate_vector,
    rows_of,
)

# Columns of a work item: first table row and number of rows (the batch) to sum over, first head and number of heads,
# queries [m_lo, m_hi) and keys [n_lo, n_hi). Each of these two ranges is that of one tile of the mask, or all queries
# or keys if they are summed over.
MASK_ITEM = tl.constexpr(8)


@triton.jit
def score_gradient(block, j0, seq, k_rows, v_rows, C: tl.constexpr):
    """Return dS (M, N) of a QueryBlock and the tile of keys at j0.

    The derivative of the softcap is not a factor, because the mask is added after the softcap.
    """
    o_m, within = block.queries, tl.arange(0, C.BLOCK_N)
    o_n = j0 + within
    b_k = load(k_rows, o_n, C.BLOCK_D, False, C.EVEN)  # (N, D)
    b_v = load(v_rows, o_n, C.BLOCK_DV, False, C.EVEN)  # (N, Dv)
    b_k_rest = load_rest(k_rows, o_n, C.BLOCK_D, C.BLOCK_REST, False, C.EVEN)
    b_v_rest = load_rest(v_rows, o_n, C.BLOCK_DV, C.BLOCK_DV_REST, False, C.EVEN)
    b_q = load_again(block.q, block.q_rows, o_m, C.BLOCK_D, C)
    s = rows_times_rows(b_q, block.rest, b_k, b_k_rest, C.BLOCK_M, C.BLOCK_N, C.BLOCK_REST, C)  # (M, N)
    s, _ = modify(s, o_m[:, None], o_n[None, :], seq, C)
    seen = visible(o_m[:, None], j0, within[None, :], seq.band, C)
    seen = unskipped(seen, o_m[:, None], o_n[None, :], 1, seq, C)
    p = tl.where(seen, probabilities(s, block.lse[:, None]), 0.0)
    b_do = load_again(block.do, block.do_rows, o_m, C.BLOCK_DV, C)
    b_v = load_again(b_v, v_rows, o_n, C.BLOCK_DV, C)
    dp = rows_times_rows(b_do, block.do_rest, b_v, b_v_rest, C.BLOCK_M, C.BLOCK_N, C.BLOCK_DV_REST, C)  # (M, N)
    dp = dp * dropout_factor(o_m, j0, seq, C)
    return p * (dp - block.delta[:, None])


@triton.jit(do_not_specialize=["head_dim", "value_dim"])
def attention_backward_mask(table, floats, items, head_dim, value_dim, C: tl.constexpr):
    """Store one tile of dmask, summed over the dimensions (batch, heads, queries, keys) that the mask broadcasts."""
    item = items + tl.program_id(0) * MASK_ITEM
    first, batch = tl.load(item).to(tl.int64), tl.load(item + 1)
    first_head, heads = tl.load(item + 2), tl.load(item + 3)
    m_lo, m_hi = tl.load(item + 4), tl.load(item + 5)
    n_lo, n_hi = tl.load(item + 6), tl.load(item + 7)
    total = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    for b in range(0, batch):
        t = table + (first + b) * col.WIDTH
        scalars = floats + (first + b) * col.SCALARS
        q_len = tl.load(t + col.Q_LEN).to(tl.int32)
        kv_len = tl.load(t + col.KV_LEN).to(tl.int32)
        group = tl.load(t + col.GROUP).to(tl.int32)
        for head in range(first_head, first_head + heads):
            seq = load_sequence(t, scalars, head)
            q_rows = rows_of(t, col.Q, head, q_len, head_dim, C)
            do_rows = rows_of(t, col.DO, head, q_len, value_dim, C)
            k_rows = rows_of(t, col.K, head // group, kv_len, head_dim, C)
            v_rows = rows_of(t, col.V, head // group, kv_len, value_dim, C)
            p_stats, stats_head = locate_vector(t, col.STATS)
            for i0 in range(m_lo, tl.minimum(m_hi, q_len), C.BLOCK_M):
                o_m = i0 + tl.arange(0, C.BLOCK_M)
                b_q = load(q_rows, o_m, C.BLOCK_D, False, C.EVEN)  # (M, D)
                b_do = load(do_rows, o_m, C.BLOCK_DV, False, C.EVEN)  # (M, Dv)
                b_rest = load_rest(q_rows, o_m, C.BLOCK_D, C.BLOCK_REST, False, C.EVEN)
                b_do_rest = load_rest(do_rows, o_m, C.BLOCK_DV, C.BLOCK_DV_REST, False, C.EVEN)
                lse, delta = load_stats(p_stats + head * stats_head, stats_head // 2, o_m)
                block = QueryBlock(
                    queries=o_m, q=b_q, rest=b_rest, do=b_do, do_rest=b_do_rest, lse=lse, delta=delta, q_rows=q_rows,
                    do_rows=do_rows,
                )  # fmt: skip
                for j0 in range(n_lo, tl.minimum(n_hi, kv_len), C.BLOCK_N):
                    if not C.BLOCKS:  # noqa: SIM114  # Triton compiles only one branch
                        total += score_gradient(block, j0, seq, k_rows, v_rows, C)
                    elif tile_is_seen(i0, j0, seq, C):
                        total += score_gradient(block, j0, seq, k_rows, v_rows, C)
    t = table + first * col.WIDTH
    base = tl.load(t + col.DMASK).to(tl.pointer_type(C.DMASK_DTYPE)) + first_head * tl.load(t + col.DMASK + 1)
    row_stride, column_stride = tl.load(t + col.DMASK + 2), tl.load(t + col.DMASK + 3)
    o_m = m_lo + tl.arange(0, C.BLOCK_M)
    o_n = n_lo + tl.arange(0, C.BLOCK_N)
    m_end, n_end = tl.load(t + col.Q_ROWS).to(tl.int32), tl.load(t + col.KV_ROWS).to(tl.int32)
    # A stride of 0 marks a dimension that is summed over: only the tile's first row or column holds the sum.
    if row_stride == 0:
        total = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32) + tl.sum(total, 0)[None, :]
        m_end = m_lo + 1
    if column_stride == 0:
        total = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32) + tl.sum(total, 1)[:, None]
        n_end = n_lo + 1
    at = base + o_m[:, None] * row_stride + o_n[None, :] * column_stride
    tl.store(at, cast(total, C.DMASK_DTYPE), mask=(o_m[:, None] < m_end) & (o_n[None, :] < n_end))


# Columns of a work item: first table row of a problem and its number of rows.
SINK_ITEM = tl.constexpr(2)


@triton.jit(do_not_specialize=["heads"])
def attention_backward_sinks(table, items, heads, C: tl.constexpr):
    """Store one element of dsinks: that of one head of one problem, float32. Grid: items × heads."""
    item = items + (tl.program_id(0) // heads) * SINK_ITEM
    head = tl.program_id(0) % heads
    first, batch = tl.load(item).to(tl.int64), tl.load(item + 1)
    t = table + first * col.WIDTH
    if head >= tl.load(t + col.HEADS):
        return
    sink = tl.load(tl.load(t + col.SINKS).to(tl.pointer_type(tl.float32)) + head) * LOG2E
    total = tl.full([C.BLOCK_M], 0.0, tl.float32)
    for b in range(0, batch):
        row = t + b * col.WIDTH
        q_len = tl.load(row + col.Q_LEN).to(tl.int32)
        p_stats, stats_head = locate_vector(row, col.STATS)
        for i0 in range(0, q_len, C.BLOCK_M):
            o_m = i0 + tl.arange(0, C.BLOCK_M)
            lse, delta = load_stats(p_stats + head * stats_head, stats_head // 2, o_m)
            total -= tl.exp2(sink - lse) * delta
    tl.store(tl.load(t + col.DSINKS).to(tl.pointer_type(tl.float32)) + head, tl.sum(total, 0))
