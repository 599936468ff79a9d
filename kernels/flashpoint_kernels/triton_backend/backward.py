"""The backward kernels: three launches, no atomics, P recomputed from lse (FlashAttention-2, Dao 2023, Algorithm 2).

    delta = rowsum(o∘do) − dlse          one program a block of queries
    dV = Pᵀ dO,  dK = scale·dSᵀ Q        one program a block of keys of one key/value head
    dQ = scale·dS K                      one program a block of queries of one head
    with P = exp(S − lse), dP = dO Vᵀ, dS = P∘(dP − delta), and dropout Z = keep/(1 − p): dV = (P∘Z)ᵀ dO, dP = (dO Vᵀ)∘Z

Notation as in forward.py. The transposed scores are computed as such (k·qᵀ): a transposed accumulator as a dot's operand
is wrong on Hopper in triton 3.4–3.7.0. A query that attends to nothing has lse −inf; +inf in its place makes its P zero.
"""

import triton
import triton.language as tl

from flashpoint_kernels.bounds import full_key_range_jit as full_key_range
from flashpoint_kernels.bounds import full_query_range_jit as full_query_range
from flashpoint_kernels.bounds import key_range_jit as key_range
from flashpoint_kernels.bounds import query_range_jit as query_range
from flashpoint_kernels.triton_backend import table as c
from flashpoint_kernels.triton_backend.interpret import cast, dot
from flashpoint_kernels.triton_backend.scores import LOG2E, keep, modify
from flashpoint_kernels.triton_backend.tiles import head_base, load_rows, load_shape, load_vector, store_rows

# Columns of a work item: table row, first query or key of the block.
ITEM = tl.constexpr(2)


@triton.jit
def load_lse(t, head, o_m, q_len):
    """lse of queries o_m in base 2; +inf, which makes P zero, where there is no query or it attends to nothing."""
    lse = load_vector(t, c.LSE, head, o_m, q_len, float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit(do_not_specialize=["heads", "value_dim"])
def attention_delta(
    table, items, heads, value_dim,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o∘do) − dlse, float32. Grid: items × heads."""
    item = items + (tl.program_id(0) // heads) * ITEM
    head = tl.program_id(0) % heads
    t = table + tl.load(item).to(tl.int64) * c.WIDTH
    if head >= tl.load(t + c.HEADS):
        return
    o_m = tl.load(item + 1) + tl.arange(0, BLOCK_M)
    q_len = tl.load(t + c.Q_LEN)
    o_base, o_stride = head_base(t, c.O, head, DTYPE, ALIGNED)
    do_base, do_stride = head_base(t, c.DO, head, DTYPE, ALIGNED)
    o = load_rows(o_base, o_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN).to(tl.float32)
    do = load_rows(do_base, do_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN).to(tl.float32)
    has_dlse = tl.load(t + c.DLSE) != 0
    delta = tl.sum(o * do, 1) - load_vector(t, c.DLSE, head, o_m, tl.where(has_dlse, q_len, 0), 0.0)
    base = tl.load(t + c.DELTA).to(tl.pointer_type(tl.float32)) + head * tl.load(t + c.DELTA + 1)
    tl.store(base + o_m, delta, mask=o_m < q_len)


@triton.jit
def softmax_gradient(p, dp, delta, slope, LEVEL: tl.constexpr):
    """dS of the raw scaled scores from P, dP and delta: through the softmax and the softcap (`slope`)."""
    ds = p * (dp - delta)
    if LEVEL >= 1:
        ds = ds * slope
    return ds


@triton.jit
def dropout_factor(i0, j0, t, scalars, head, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Z of the tile, (M, N): 1/(1 − p) where kept, 0 where dropped, 1 without dropout."""
    z = tl.full([BLOCK_M, BLOCK_N], 1.0, tl.float32)
    if tl.load(t + c.DROP_BELOW) > 0:
        z = tl.where(keep(i0, j0, t, head, BLOCK_M, BLOCK_N), tl.load(scalars + c.KEEP_SCALE), 0.0)
    return z


@triton.jit
def gather_queries(
    dk, dv, k, v, j0, lo, hi, shape, scale, t, scalars, head, q_base, q_stride, do_base, do_stride, head_dim, value_dim,
    FULL: tl.constexpr, LEVEL: tl.constexpr, DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add to (dk, dv) of a block of keys what queries [lo, hi) of one head give, a tile of BLOCK_M at a time.

    Queries past the end need no test: their lse is +inf, so their P is zero.
    """
    q_len = shape[0]
    o_n = j0 + tl.arange(0, BLOCK_N)
    for i0 in range(lo, hi, BLOCK_M):
        o_m = i0 + tl.arange(0, BLOCK_M)
        q = load_rows(q_base, q_stride, o_m, q_len, head_dim, BLOCK_D, False, EVEN)  # (M, D)
        s = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)  # (N, M)
        s, slope = modify(s, o_m[None, :], o_n[:, None], shape, scale, t, scalars, head, FULL, LEVEL, MASK_DTYPE)
        p = tl.exp2(s - load_lse(t, head, o_m, q_len)[None, :])
        do = load_rows(do_base, do_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN)  # (M, Dv)
        dp = dot(v, tl.trans(do), tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)  # (N, M)
        if LEVEL == 2:
            z = tl.trans(dropout_factor(i0, j0, t, scalars, head, BLOCK_M, BLOCK_N))
            dv = dot(cast(p * z, DTYPE), do, dv, PRECISION)
            dp = dp * z
        else:
            dv = dot(cast(p, DTYPE), do, dv, PRECISION)
        delta = load_vector(t, c.DELTA, head, o_m, q_len, 0.0)
        ds = softmax_gradient(p, dp, delta[None, :], slope, LEVEL)
        dk = dot(cast(ds, DTYPE), q, dk, PRECISION)
    return dk, dv


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
    shape = load_shape(t)
    q_len, kv_len, offset, left, right = shape
    scale = tl.load(scalars + c.SCALE)

    k_base, k_stride = head_base(t, c.K, kv_head, DTYPE, ALIGNED)
    v_base, v_stride = head_base(t, c.V, kv_head, DTYPE, ALIGNED)
    o_n = j0 + tl.arange(0, BLOCK_N)
    k = load_rows(k_base, k_stride, o_n, kv_len, head_dim, BLOCK_D, False, EVEN)  # (N, D)
    v = load_rows(v_base, v_stride, o_n, kv_len, value_dim, BLOCK_DV, False, EVEN)  # (N, Dv)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    j_last = tl.minimum(j0 + BLOCK_N, kv_len) - 1
    lo, hi = query_range(j0, j_last, offset, left, right, q_len)
    full_lo, full_hi = full_query_range(j0, j_last, offset, left, right, q_len)
    lo = lo // BLOCK_M * BLOCK_M
    hi = tl.where(j0 < kv_len, hi, lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_lo, BLOCK_M) * BLOCK_M, lo), hi)
    if LEVEL == 0:
        full_hi = hi  # no left bound: nothing is cut at the end
    else:
        full_hi = tl.minimum(tl.maximum(full_hi // BLOCK_M * BLOCK_M, full_lo), hi)
    for head in range(kv_head * group, kv_head * group + group):
        q_base, q_stride = head_base(t, c.Q, head, DTYPE, ALIGNED)
        do_base, do_stride = head_base(t, c.DO, head, DTYPE, ALIGNED)
        dk, dv = gather_queries(
            dk, dv, k, v, j0, lo, full_lo, shape, scale, t, scalars, head, q_base, q_stride, do_base, do_stride, head_dim, value_dim,
            False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
        )  # fmt: skip
        dk, dv = gather_queries(
            dk, dv, k, v, j0, full_lo, full_hi, shape, scale, t, scalars, head, q_base, q_stride, do_base, do_stride, head_dim,
            value_dim, True, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
        )  # fmt: skip
        if LEVEL >= 1:
            dk, dv = gather_queries(
                dk, dv, k, v, j0, full_hi, hi, shape, scale, t, scalars, head, q_base, q_stride, do_base, do_stride,
                head_dim, value_dim, False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
            )  # fmt: skip

    kv_rows = tl.load(t + c.KV_ROWS)
    dk = tl.where(o_n[:, None] < kv_len, dk * scale, 0.0)
    dv = tl.where(o_n[:, None] < kv_len, dv, 0.0)
    if tl.load(t + c.DK) != 0:
        dk_base, dk_stride = head_base(t, c.DK, kv_head, DTYPE, ALIGNED)
        store_rows(dk_base, dk_stride, o_n, kv_rows, head_dim, cast(dk, DTYPE), BLOCK_D)
    if tl.load(t + c.DV) != 0:
        dv_base, dv_stride = head_base(t, c.DV, kv_head, DTYPE, ALIGNED)
        store_rows(dv_base, dv_stride, o_n, kv_rows, value_dim, cast(dv, DTYPE), BLOCK_DV)


@triton.jit
def gather_keys(
    dq, q, do, lse, delta, i0, lo, hi, shape, scale, t, scalars, head, k_base, k_stride, v_base, v_stride, head_dim, value_dim,
    FULL: tl.constexpr, LEVEL: tl.constexpr, DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add to dq of a block of queries what keys [lo, hi) give, a tile of BLOCK_N at a time."""
    kv_len = shape[1]
    o_m = i0 + tl.arange(0, BLOCK_M)
    for j0 in range(lo, hi, BLOCK_N):
        o_n = j0 + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, k_stride, o_n, kv_len, head_dim, BLOCK_D, FULL, EVEN)  # (N, D)
        v = load_rows(v_base, v_stride, o_n, kv_len, value_dim, BLOCK_DV, FULL, EVEN)  # (N, Dv)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)  # (M, N)
        s, slope = modify(s, o_m[:, None], o_n[None, :], shape, scale, t, scalars, head, FULL, LEVEL, MASK_DTYPE)
        p = tl.exp2(s - lse[:, None])
        dp = dot(do, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)  # (M, N)
        if LEVEL == 2:
            dp = dp * dropout_factor(i0, j0, t, scalars, head, BLOCK_M, BLOCK_N)
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
    shape = load_shape(t)
    q_len, kv_len, offset, left, right = shape
    scale = tl.load(scalars + c.SCALE)
    group = tl.load(t + c.GROUP).to(tl.int32)

    q_base, q_stride = head_base(t, c.Q, head, DTYPE, ALIGNED)
    do_base, do_stride = head_base(t, c.DO, head, DTYPE, ALIGNED)
    k_base, k_stride = head_base(t, c.K, head // group, DTYPE, ALIGNED)
    v_base, v_stride = head_base(t, c.V, head // group, DTYPE, ALIGNED)
    o_m = i0 + tl.arange(0, BLOCK_M)
    q = load_rows(q_base, q_stride, o_m, q_len, head_dim, BLOCK_D, False, EVEN)  # (M, D)
    do = load_rows(do_base, do_stride, o_m, q_len, value_dim, BLOCK_DV, False, EVEN)  # (M, Dv)
    lse = load_lse(t, head, o_m, q_len)
    delta = load_vector(t, c.DELTA, head, o_m, q_len, 0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    i_last = tl.minimum(i0 + BLOCK_M, q_len) - 1
    lo, hi = key_range(i0, i_last, offset, left, right, kv_len)
    full_lo, full_hi = full_key_range(i0, i_last, offset, left, right, kv_len)
    lo = lo // BLOCK_N * BLOCK_N
    hi = tl.where(i0 < q_len, hi, lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_lo, BLOCK_N) * BLOCK_N, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo), hi)
    if LEVEL == 0:
        full_lo = lo
    else:
        dq = gather_keys(
            dq, q, do, lse, delta, i0, lo, full_lo, shape, scale, t, scalars, head, k_base, k_stride, v_base, v_stride, head_dim,
            value_dim, False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
        )  # fmt: skip
    dq = gather_keys(
        dq, q, do, lse, delta, i0, full_lo, full_hi, shape, scale, t, scalars, head, k_base, k_stride, v_base, v_stride, head_dim,
        value_dim, True, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
    )  # fmt: skip
    dq = gather_keys(
        dq, q, do, lse, delta, i0, full_hi, hi, shape, scale, t, scalars, head, k_base, k_stride, v_base, v_stride, head_dim,
        value_dim, False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
    )  # fmt: skip

    dq = tl.where(o_m[:, None] < q_len, dq * scale, 0.0)
    dq_base, dq_stride = head_base(t, c.DQ, head, DTYPE, ALIGNED)
    store_rows(dq_base, dq_stride, o_m, tl.load(t + c.Q_ROWS), head_dim, cast(dq, DTYPE), BLOCK_D)
