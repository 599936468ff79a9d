"""The backward kernels: three launches, no atomics, P recomputed from lse (FlashAttention-2, Dao 2023, Algorithm 2).

    delta = rowsum(o∘do) − dlse          one program a block of queries
    dV = Pᵀ dO,  dK = scale·dSᵀ Q        one program a block of keys of one key/value head
    dQ = scale·dS K                      one program a block of queries of one head
    with P = exp(S − lse), dP = dO Vᵀ, dS = P∘(dP − delta)
    and dropout Z = keep/(1 − p): dV = (P∘Z)ᵀ dO, dP = (dO Vᵀ)∘Z

Notation as in forward.py. The transposed scores are computed as such (k·qᵀ): a transposed accumulator as the operand of
a dot is wrong on Hopper in triton 3.4–3.7.0.
"""

import triton
import triton.language as tl

from flashpoint_kernels.bounds import query_range_jit as query_range
from flashpoint_kernels.triton_backend import table as c
from flashpoint_kernels.triton_backend.interpret import cast, dot
from flashpoint_kernels.triton_backend.scores import LOG2E, keep, modify, probabilities, visible, visible_to
from flashpoint_kernels.triton_backend.tiles import (
    key_stretches,
    load_rows,
    load_sequence,
    locate,
    locate_vector,
    store_rows,
)

# Columns of a work item: table row, first query or key of the block.
ITEM = tl.constexpr(2)


@triton.jit
def load_stats(stats, half, o_m):
    """(lse in base 2, delta) of a whole block of queries, as `attention_delta` left them (see Launch.place_stats).

    +inf and 0 where there is no query, so that no mask is needed: it costs most in a loop.
    """
    return tl.load(stats + o_m), tl.load(stats + half + o_m)


@triton.jit(do_not_specialize=["heads", "value_dim"])
def attention_delta(
    table, items, heads, value_dim,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What the other kernels need of a query, float32: lse in base 2, and delta = rowsum(o∘do) − dlse.

    A query that attends to nothing has lse −inf; +inf in its place makes its P zero, and so it does for rows of a block
    that are no queries. Grid: items × heads.
    """
    item = items + (tl.program_id(0) // heads) * ITEM
    head = tl.program_id(0) % heads
    t = table + tl.load(item).to(tl.int64) * c.WIDTH
    if head >= tl.load(t + c.HEADS):
        return
    o_m = tl.load(item + 1) + tl.arange(0, BLOCK_M)
    q_len = tl.load(t + c.Q_LEN)
    o_base, o_head, o_stride = locate(t, c.O, DTYPE, ALIGNED)
    o_base += head * o_head
    do_base, do_head, do_stride = locate(t, c.DO, DTYPE, ALIGNED)
    do_base += head * do_head
    o = load_rows(o_base, o_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN).to(tl.float32)
    do = load_rows(do_base, do_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN).to(tl.float32)
    dlse_rows = tl.where(tl.load(t + c.DLSE) != 0, q_len, 0)
    dlse_base, dlse_head = locate_vector(t, c.DLSE)
    dlse = tl.load(dlse_base + head * dlse_head + o_m, mask=o_m < dlse_rows, other=0.0)
    lse_base, lse_head = locate_vector(t, c.LSE)
    lse = tl.load(lse_base + head * lse_head + o_m, mask=o_m < q_len, other=float("-inf"))
    stats_base, stats_head = locate_vector(t, c.STATS)
    stats = stats_base + head * stats_head + o_m
    tl.store(stats, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E))
    tl.store(stats + stats_head // 2, tl.where(lse == float("-inf"), 0.0, tl.sum(o * do, 1) - dlse))


@triton.jit
def softmax_gradient(p, dp, delta, slope, LEVEL: tl.constexpr):
    """dS of the raw scaled scores from P, dP and delta: through the softmax and the scores' transform (`slope`)."""
    ds = p * (dp - delta)
    if LEVEL >= 1:
        ds = ds * slope
    return ds


@triton.jit
def dropout_factor(i0, j0, seq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Z of the tile, (M, N): 1/(1 − p) where kept, 0 where dropped, 1 without dropout."""
    z = tl.full([BLOCK_M, BLOCK_N], 1.0, tl.float32)
    t, scalars, _head, _scale, _shape = seq
    if tl.load(t + c.DROP_BELOW) > 0:
        z = tl.where(keep(i0, j0, seq, BLOCK_M, BLOCK_N), tl.load(scalars + c.KEEP_SCALE), 0.0)
    return z


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_kv(
    table, floats, items, heads, head_dim, value_dim,
    LEVEL: tl.constexpr, DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, summed over its queries and its group of query heads in a fixed order.

    Grid: items × `heads`, the largest number of key/value heads of the launch.
    """
    item = items + (tl.program_id(0) // heads) * ITEM
    kv_head = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * c.WIDTH
    group = tl.load(t + c.GROUP).to(tl.int32)
    if kv_head * group >= tl.load(t + c.HEADS):
        return
    scalars = floats + row * c.SCALARS
    j0 = tl.load(item + 1)
    _, _, _, scale, shape = load_sequence(t, scalars, kv_head)
    q_len, kv_len, offset, left, right = shape

    k_base, k_head, k_stride = locate(t, c.K, DTYPE, ALIGNED)
    k_base += kv_head * k_head
    v_base, v_head, v_stride = locate(t, c.V, DTYPE, ALIGNED)
    v_base += kv_head * v_head
    within = tl.arange(0, BLOCK_M)
    o_n = j0 + tl.arange(0, BLOCK_N)
    k = load_rows(k_base, k_stride, o_n, kv_len, head_dim, BLOCK_D, False, EVEN)  # (N, D)
    v = load_rows(v_base, v_stride, o_n, kv_len, value_dim, BLOCK_DV, False, EVEN)  # (N, Dv)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    j_last = tl.minimum(j0 + BLOCK_N, kv_len) - 1
    lo, hi = query_range(j0, j_last, offset, left, right, q_len)
    lo = lo // BLOCK_M * BLOCK_M
    blocks = tl.where(j0 < kv_len, tl.maximum(tl.cdiv(hi - lo, BLOCK_M), 0), 0)
    q_base, q_head, q_stride = locate(t, c.Q, DTYPE, ALIGNED)
    q_base += kv_head * group * q_head
    do_base, do_head, do_stride = locate(t, c.DO, DTYPE, ALIGNED)
    do_base += kv_head * group * do_head
    stats_base, stats_head = locate_vector(t, c.STATS)
    stats_base += kv_head * group * stats_head
    # One flat loop over the group's heads and their blocks of queries: a nest of loops, or a second body for tiles that
    # need no visibility test, costs more registers than there are.
    nth, i0 = 0, lo
    for _ in range(0, group * blocks):
        seq = (t, scalars, kv_head * group + nth, scale, shape)
        o_m = i0 + within
        q = load_rows(q_base + nth * q_head, q_stride, o_m, q_len, head_dim, BLOCK_D, False, EVEN)  # (M, D)
        s = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)  # (N, M)
        s, slope = modify(s, o_m[None, :], o_n[:, None], seq, LEVEL, MASK_DTYPE)
        # Aligned to 16 bytes: otherwise triton 3.6 copies each thread's columns four bytes at a time.
        stats = tl.multiple_of(stats_base + nth * stats_head + i0, 16)
        lse, delta = load_stats(stats, tl.multiple_of(stats_head // 2, 4), within)
        # Not tested: keys beyond the last, whose rows of dk and dv are dropped, and queries, whose lse makes P zero.
        seen = visible_to(o_n[:, None], i0, within[None, :], shape, LEVEL)
        p = tl.where(seen, probabilities(s, lse[None, :]), 0.0)
        do = load_rows(do_base + nth * do_head, do_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN)  # (M, Dv)
        dp = dot(v, tl.trans(do), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)  # (N, M)
        if LEVEL == 2:
            z = tl.trans(dropout_factor(i0, j0, seq, BLOCK_M, BLOCK_N))
            dv = dot(cast(p * z, DTYPE), do, dv, PRECISION)
            dp = dp * z
        else:
            dv = dot(cast(p, DTYPE), do, dv, PRECISION)
        ds = softmax_gradient(p, dp, delta[None, :], slope, LEVEL)
        dk = dot(cast(ds, DTYPE), q, dk, PRECISION)
        i0 += BLOCK_M
        nth += tl.where(i0 >= hi, 1, 0)
        i0 = tl.where(i0 >= hi, lo, i0)

    kv_rows = tl.load(t + c.KV_ROWS)
    valid = o_n[:, None] < kv_len
    if tl.load(t + c.DV) != 0:
        dv_base, dv_head, dv_stride = locate(t, c.DV, DTYPE, ALIGNED)
        b_dv = tl.where(valid, cast(dv, DTYPE), 0.0)
        store_rows(dv_base + kv_head * dv_head, dv_stride, o_n, kv_rows, value_dim, b_dv, BLOCK_DV, EVEN)
    if tl.load(t + c.DK) != 0:
        dk_base, dk_head, dk_stride = locate(t, c.DK, DTYPE, ALIGNED)
        b_dk = tl.where(valid, cast(dk * scale, DTYPE), 0.0)
        store_rows(dk_base + kv_head * dk_head, dk_stride, o_n, kv_rows, head_dim, b_dk, BLOCK_D, EVEN)


@triton.jit
def gather_keys(
    dq, q, do, lse, delta, i0, lo, hi, seq, k_base, k_stride, v_base, v_stride, head_dim, value_dim,
    FULL: tl.constexpr, LEVEL: tl.constexpr, DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add to dq of a block of queries what keys [lo, hi) give, a tile of BLOCK_N at a time."""
    kv_len = seq[4][1]
    o_m = i0 + tl.arange(0, BLOCK_M)
    within = tl.arange(0, BLOCK_N)
    for j0 in range(lo, hi, BLOCK_N):
        o_n = j0 + within
        k = load_rows(k_base, k_stride, o_n, kv_len, head_dim, BLOCK_D, FULL, EVEN)  # (N, D)
        v = load_rows(v_base, v_stride, o_n, kv_len, value_dim, BLOCK_DV, FULL, EVEN)  # (N, Dv)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)  # (M, N)
        s, slope = modify(s, o_m[:, None], o_n[None, :], seq, LEVEL, MASK_DTYPE)
        p = probabilities(s, lse[:, None])
        if not FULL:
            p = tl.where(visible(o_m[:, None], j0, within[None, :], seq[4], LEVEL), p, 0.0)
        dp = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)  # (M, N)
        if LEVEL == 2:
            dp = dp * dropout_factor(i0, j0, seq, BLOCK_M, BLOCK_N)
        ds = softmax_gradient(p, dp, delta[:, None], slope, LEVEL)
        dq = dot(cast(ds, DTYPE), k, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_q(
    table, floats, items, heads, head_dim, value_dim,
    LEVEL: tl.constexpr, DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head. Grid: items × `heads`, the largest head count of the launch."""
    item = items + (tl.program_id(0) // heads) * ITEM
    head = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * c.WIDTH
    if head >= tl.load(t + c.HEADS):
        return
    scalars = floats + row * c.SCALARS
    i0 = tl.load(item + 1)
    seq = load_sequence(t, scalars, head)
    q_len = seq[4][0]
    group = tl.load(t + c.GROUP).to(tl.int32)

    q_base, q_head, q_stride = locate(t, c.Q, DTYPE, ALIGNED)
    q_base += head * q_head
    do_base, do_head, do_stride = locate(t, c.DO, DTYPE, ALIGNED)
    do_base += head * do_head
    k_base, k_head, k_stride = locate(t, c.K, DTYPE, ALIGNED)
    k_base += head // group * k_head
    v_base, v_head, v_stride = locate(t, c.V, DTYPE, ALIGNED)
    v_base += head // group * v_head
    o_m = i0 + tl.arange(0, BLOCK_M)
    q = load_rows(q_base, q_stride, o_m, q_len, head_dim, BLOCK_D, False, EVEN)  # (M, D)
    do = load_rows(do_base, do_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN)  # (M, Dv)
    stats_base, stats_head = locate_vector(t, c.STATS)
    lse, delta = load_stats(stats_base + head * stats_head, stats_head // 2, o_m)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    lo, full_lo, full_hi, hi = key_stretches(i0, seq[4], 0, seq[4][1], LEVEL, BLOCK_M, BLOCK_N)
    if LEVEL >= 1:
        dq = gather_keys(
            dq, q, do, lse, delta, i0, lo, full_lo, seq, k_base, k_stride, v_base, v_stride, head_dim, value_dim,
            False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
        )  # fmt: skip
    dq = gather_keys(
        dq, q, do, lse, delta, i0, full_lo, full_hi, seq, k_base, k_stride, v_base, v_stride, head_dim, value_dim,
        True, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
    )  # fmt: skip
    dq = gather_keys(
        dq, q, do, lse, delta, i0, full_hi, hi, seq, k_base, k_stride, v_base, v_stride, head_dim, value_dim,
        False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
    )  # fmt: skip

    dq = tl.where(o_m[:, None] < q_len, dq * seq[3], 0.0)
    dq_base, dq_head, dq_stride = locate(t, c.DQ, DTYPE, ALIGNED)
    dq_base += head * dq_head
    store_rows(dq_base, dq_stride, o_m, tl.load(t + c.Q_ROWS), head_dim, cast(dq, DTYPE), BLOCK_D, EVEN)
