"""The forward kernel: one program a block of queries of one head (FlashAttention-2, Dao 2023, Algorithm 1).

Notation: o_ offsets, b_ blocks; M queries and N keys of a tile; s scores and p probabilities; m running maximum and
denom running denominator of a row, in base 2 with the scale folded into the exponent in float32;
lse = (m + log2 denom)·ln 2.
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend import table as c
from flashpoint_kernels.triton_backend.interpret import cast, dot
from flashpoint_kernels.triton_backend.scores import LN2, LOG2E, keep, modify, visible
from flashpoint_kernels.triton_backend.tiles import (
    key_stretches,
    load_rows,
    load_sequence,
    locate,
    locate_vector,
    store_rows,
)

# Columns of a work item: table row, first query, keys [lo, hi) of its part, and the part's scratch slot (-1: no split).
ITEM = tl.constexpr(5)


@triton.jit
def finite(m):
    """A row's maximum, or 0 for a row that has seen no key yet: what may be subtracted without making NaN of −inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def online_softmax(s, unit, m, denom):
    """One step of the online softmax (Milakov and Gimelshein 2018): (p, m, denom, by what o's sum so far shrinks).

    The scores in base 2 are s·unit, with unit > 0: inside the exponent the product costs nothing, and the largest score
    is that of the largest s.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * unit)
    shift = finite(m_new)
    p = tl.exp2(s * unit - shift[:, None])
    shrink = tl.exp2(m - shift)
    return p, m_new, denom * shrink + tl.sum(p, 1), shrink


@triton.jit
def attend_keys(
    q, m, denom, acc, i0, lo, hi, seq, k_base, k_stride, v_base, v_stride, head_dim, value_dim,
    FULL: tl.constexpr, LEVEL: tl.constexpr, DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Fold keys [lo, hi) into (m, denom, acc), a tile of BLOCK_N at a time; lo is a multiple of BLOCK_N."""
    kv_len = seq[4][1]
    o_m = i0 + tl.arange(0, BLOCK_M)
    within = tl.arange(0, BLOCK_N)
    for j0 in range(lo, hi, BLOCK_N):
        o_n = j0 + within
        k = load_rows(k_base, k_stride, o_n, kv_len, head_dim, BLOCK_D, FULL, EVEN)  # (N, D)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)  # (M, N)
        unit = seq[3] * LOG2E
        if LEVEL >= 1:
            s, _ = modify(s, o_m[:, None], o_n[None, :], seq, LEVEL, MASK_DTYPE)
            unit = 1.0
        if not FULL:
            s = tl.where(visible(o_m[:, None], j0, within[None, :], seq[4], LEVEL), s, float("-inf"))
        p, m, denom, shrink = online_softmax(s, unit, m, denom)
        acc *= shrink[:, None]
        if LEVEL == 2:
            if tl.load(seq[0] + c.DROP_BELOW) > 0:
                p = tl.where(keep(i0, j0, seq, BLOCK_M, BLOCK_N), p, 0.0)
        v = load_rows(v_base, v_stride, o_n, kv_len, value_dim, BLOCK_DV, FULL, EVEN)  # (N, Dv)
        acc = dot(cast(p, DTYPE), v, acc, PRECISION)
    return m, denom, acc


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_forward(
    table, floats, items, part_o, part_lse, heads, head_dim, value_dim,
    LEVEL: tl.constexpr, DTYPE: tl.constexpr, MASK_DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """o and lse of one work item and head. Grid: work items × `heads`, the largest head count of the launch.

    table (rows, WIDTH) int64, floats (rows, SCALARS) float32, items (n, ITEM) int32; part_o (slots, heads, BLOCK_M,
    BLOCK_DV) and part_lse (slots, heads, BLOCK_M) float32 take the parts of problems that are split over keys.
    """
    item = items + (tl.program_id(0) // heads) * ITEM
    head = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * c.WIDTH
    if head >= tl.load(t + c.HEADS):
        return
    scalars = floats + row * c.SCALARS
    i0 = tl.load(item + 1)
    part_lo, part_hi = tl.load(item + 2), tl.load(item + 3)
    slot = tl.load(item + 4)
    seq = load_sequence(t, scalars, head)
    q_len = seq[4][0]
    group = tl.load(t + c.GROUP).to(tl.int32)

    q_base, q_head, q_stride = locate(t, c.Q, DTYPE, ALIGNED)
    q_base += head * q_head
    k_base, k_head, k_stride = locate(t, c.K, DTYPE, ALIGNED)
    k_base += head // group * k_head
    v_base, v_head, v_stride = locate(t, c.V, DTYPE, ALIGNED)
    v_base += head // group * v_head
    o_m = i0 + tl.arange(0, BLOCK_M)
    q = load_rows(q_base, q_stride, o_m, q_len, head_dim, BLOCK_D, False, EVEN)  # (M, D)

    # A sink is a key without a value: it starts the denominator, in the first part of a split problem alone.
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denom = tl.zeros([BLOCK_M], tl.float32)
    if LEVEL >= 1:
        has_sink = (tl.load(t + c.SINKS) != 0) & (part_lo == 0)
        sinks = tl.load(t + c.SINKS).to(tl.pointer_type(tl.float32))
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head, mask=has_sink, other=float("-inf")) * LOG2E
        denom = tl.where(has_sink & (o_m >= 0), 1.0, denom)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    lo, full_lo, full_hi, hi = key_stretches(i0, seq[4], part_lo, part_hi, LEVEL, BLOCK_M, BLOCK_N)
    if LEVEL >= 1:
        m, denom, acc = attend_keys(
            q, m, denom, acc, i0, lo, full_lo, seq, k_base, k_stride, v_base, v_stride, head_dim,
            value_dim, False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
        )  # fmt: skip
    m, denom, acc = attend_keys(
        q, m, denom, acc, i0, full_lo, full_hi, seq, k_base, k_stride, v_base, v_stride, head_dim,
        value_dim, True, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
    )  # fmt: skip
    m, denom, acc = attend_keys(
        q, m, denom, acc, i0, full_hi, hi, seq, k_base, k_stride, v_base, v_stride, head_dim,
        value_dim, False, LEVEL, DTYPE, MASK_DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN,
    )  # fmt: skip

    denom = tl.where(denom == 0.0, 1.0, denom)  # no key and no sink: m is −inf, so o = 0 and lse = −inf
    o = acc / denom[:, None]
    lse = m + tl.log2(denom)
    if LEVEL == 2:
        o *= tl.load(scalars + c.KEEP_SCALE)
    if slot >= 0:
        o_d = tl.arange(0, BLOCK_DV)
        part = slot.to(tl.int64) * heads + head
        within = tl.arange(0, BLOCK_M)
        tl.store(part_lse + part * BLOCK_M + within, lse)
        tl.store(part_o + part * (BLOCK_M * BLOCK_DV) + within[:, None] * BLOCK_DV + o_d[None, :], o)
    else:
        store_answer(o, lse, t, head, o_m, q_len, value_dim, DTYPE, ALIGNED, BLOCK_DV, EVEN)


@triton.jit
def store_answer(
    o, lse, t, head, o_m, q_len, value_dim,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write o (M, Dv) and lse (M,) in base 2 for rows o_m; rows of padding get 0 and −inf."""
    q_rows = tl.load(t + c.Q_ROWS)
    o = tl.where(o_m[:, None] < q_len, o, 0.0)
    lse = tl.where(o_m < q_len, lse * LN2, float("-inf"))
    o_base, o_head, o_stride = locate(t, c.O, DTYPE, ALIGNED)
    o_base += head * o_head
    store_rows(o_base, o_stride, o_m, q_rows, value_dim, cast(o, DTYPE), BLOCK_DV, EVEN)
    wanted_rows = tl.where(tl.load(t + c.LSE) != 0, q_rows, 0)
    lse_base, lse_head = locate_vector(t, c.LSE)
    tl.store(lse_base + head * lse_head + o_m, lse, mask=o_m < wanted_rows)


# Columns of a merge item: table row, first query, first scratch slot, number of parts.
MERGE_ITEM = tl.constexpr(4)


@triton.jit(do_not_specialize=["heads", "value_dim"])
def merge_parts(
    table, items, part_o, part_lse, heads, value_dim,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a block of queries in their order: o = Σ w·oₚ / Σ w with w = 2^(lseₚ − max)."""
    item = items + (tl.program_id(0) // heads) * MERGE_ITEM
    head = tl.program_id(0) % heads
    t = table + tl.load(item).to(tl.int64) * c.WIDTH
    if head >= tl.load(t + c.HEADS):
        return
    first, parts = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
    within = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_DV)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denom = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for n in range(0, parts):
        part = (first + n) * heads + head
        lse = tl.load(part_lse + part * BLOCK_M + within)
        o = tl.load(part_o + part * (BLOCK_M * BLOCK_DV) + within[:, None] * BLOCK_DV + o_d[None, :])
        m_new = tl.maximum(m, lse)
        shift = finite(m_new)
        weight, shrink = tl.exp2(lse - shift), tl.exp2(m - shift)
        acc = acc * shrink[:, None] + o * weight[:, None]
        denom = denom * shrink + weight
        m = m_new
    denom = tl.where(denom == 0.0, 1.0, denom)  # no key and no sink: m is −inf, so o = 0 and lse = −inf
    o = acc / denom[:, None]
    lse = m + tl.log2(denom)
    store_answer(
        o, lse, t, head, tl.load(item + 1) + within, tl.load(t + c.Q_LEN), value_dim, DTYPE, ALIGNED, BLOCK_DV, EVEN
    )
