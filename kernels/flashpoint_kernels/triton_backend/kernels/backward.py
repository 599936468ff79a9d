"""The backward kernels: three launches, no atomics, P recomputed from lse (FlashAttention-2, Dao 2023, Algorithm 2).

    delta = rowsum(o∘do) − dlse          one program per block of queries
    dV = Pᵀ dO,  dK = scale·dSᵀ Q        one program per block of keys of one key/value head
    dQ = scale·dS K                      one program per block of queries of one head, here or in stored.py
    with P = exp(S − lse), dP = dO Vᵀ, dS = P∘(dP − delta)
    and dropout Z = keep/(1 − p): dV = (P∘Z)ᵀ dO, dP = (dO Vᵀ)∘Z

The notation is that of forward.py. The transposed scores are computed directly (k·qᵀ): Triton 3.4–3.7.0 gives wrong
results on Hopper if a transposed accumulator is the operand of a dot.

The columns of a wide head are in two parts, and a product over columns is the sum of two. `rest` has the last columns:
BLOCK_REST of q and k, and BLOCK_DV_REST of do and v.
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.blocks import key_tile, list_at, listed_stretches, query_tile, unskipped
from flashpoint_kernels.triton_backend.kernels.bounds import query_range
from flashpoint_kernels.triton_backend.kernels.groups import KeysAndValues, QueryBlock, Sequence
from flashpoint_kernels.triton_backend.kernels.interpret import cast, dot
from flashpoint_kernels.triton_backend.kernels.scores import LOG2E, keep, modify, probabilities, visible, visible_to
from flashpoint_kernels.triton_backend.kernels.tiles import (
    block_at,
    heads_column,
    key_stretches,
    load,
    load_again,
    load_rest,
    load_sequence,
    locate_vector,
    next_head,
    next_stored,
    places_of_ds,
    rows_of,
    store,
    store_rest,
    stored_of,
)

# Columns of a work item: table row, first row of the block of queries or keys; with a block mask, also the position of
# its lists.
ITEM = tl.constexpr(2)


@triton.jit
def load_stats(p_stats, half, o_m):
    """Return (lse in base 2, delta) of a whole block of queries, as stored by `attention_delta`.

    Rows without a query have +inf and 0 (see grouped.py), so no mask is needed: a mask is expensive in a loop.
    """
    return tl.load(p_stats + o_m), tl.load(p_stats + half + o_m)


@triton.jit(do_not_specialize=["heads", "value_dim"])
def attention_delta(table, items, heads, value_dim, C: tl.constexpr):
    """Store two float32 values per query for the other kernels: lse in base 2, and delta = rowsum(o∘do) − dlse.

    A query that attends to no key has lse −inf; it is stored as +inf, which makes its P zero. Rows of a block beyond
    the last query get the same value. Grid: items × heads.
    """
    item = items + (tl.program_id(0) // heads) * ITEM
    head = tl.program_id(0) % heads
    t = table + tl.load(item).to(tl.int64) * col.WIDTH
    if head >= tl.load(t + col.HEADS):
        return
    o_m = tl.load(item + 1) + tl.arange(0, C.BLOCK_M)
    q_len = tl.load(t + col.Q_LEN)
    o_rows = rows_of(t, col.O, head, q_len, value_dim, C)
    do_rows = rows_of(t, col.DO, head, q_len, value_dim, C)
    b_o = load(o_rows, o_m, C.BLOCK_DV, False, C.EVEN).to(tl.float32)
    b_do = load(do_rows, o_m, C.BLOCK_DV, False, C.EVEN).to(tl.float32)
    dlse_rows = tl.where(tl.load(t + col.DLSE) != 0, q_len, 0)
    p_dlse, dlse_head = locate_vector(t, col.DLSE)
    dlse = tl.load(p_dlse + head * dlse_head + o_m, mask=o_m < dlse_rows, other=0.0)
    p_lse, lse_head = locate_vector(t, col.LSE)
    lse = tl.load(p_lse + head * lse_head + o_m, mask=o_m < q_len, other=float("-inf"))
    p_stats, stats_head = locate_vector(t, col.STATS)
    p_stats += head * stats_head + o_m
    tl.store(p_stats, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E))
    tl.store(p_stats + stats_head // 2, tl.where(lse == float("-inf"), 0.0, tl.sum(b_o * b_do, 1) - dlse))


@triton.jit
def softmax_gradient(p, dp, delta, slope, C: tl.constexpr):
    """Return dS, of the scaled scores before softcap, from P, dP and delta; `slope` is the derivative of softcap."""
    ds = p * (dp - delta)
    if C.LEVEL >= 1:
        ds = ds * slope
    return ds


@triton.jit
def dropout_factor(queries, j0, seq, C: tl.constexpr):
    """Return Z of the tile, (M, N): 1/(1 − p) for kept keys, 0 for dropped keys, 1 without dropout."""
    z = tl.full([C.BLOCK_M, C.BLOCK_N], 1.0, tl.float32)
    if tl.load(seq.row + col.DROP_BELOW) > 0:
        z = tl.where(keep(queries, j0, seq, C), tl.load(seq.scalars + col.KEEP_SCALE), 0.0)
    return z


@triton.jit
def rows_times_rows(a, a_rest, b, b_rest, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr, C: tl.constexpr):
    """Return a·bᵀ (M, N) of rows in two parts; without REST, of one part."""
    product = dot(a, tl.trans(b), tl.full([M, N], 0.0, tl.float32), C.TF32)
    if REST:
        product = dot(a_rest, tl.trans(b_rest), product, C.TF32)
    return product


@triton.jit
def zeros_rest(M: tl.constexpr, REST: tl.constexpr):
    """Return zeros (M, REST) in float32; 0 if REST is 0."""
    zeros = 0
    if REST:
        zeros = tl.full([M, REST], 0.0, tl.float32)
    return zeros


@triton.jit
def add_rest(total, a, b, REST: tl.constexpr, C: tl.constexpr):
    """Return total + a·b for the last columns of b; `total` if REST is 0."""
    if REST:
        total = dot(a, b, total, C.TF32)
    return total


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_kv(table, floats, items, lists, heads, head_dim, value_dim, C: tl.constexpr):
    """Store dk and dv of a block of keys, summed over its queries and its group of query heads in a fixed order.

    STORE_DS: store dS, too (see stored.py). Grid: items × `heads`, the largest number of key/value heads of the launch.
    """
    item = items + (tl.program_id(0) // heads) * (ITEM + 1 if C.BLOCKS else ITEM)
    kv_head = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * col.WIDTH
    group = tl.load(t + col.GROUP).to(tl.int32)
    if kv_head * group >= tl.load(t + col.HEADS):
        return
    scalars = floats + row * col.SCALARS
    j0 = tl.load(item + 1)
    first = load_sequence(t, scalars, kv_head * group)  # the first query head of the group
    band = first.band

    k_rows = rows_of(t, col.K, kv_head, band.kv_len, head_dim, C)
    v_rows = rows_of(t, col.V, kv_head, band.kv_len, value_dim, C)
    within = tl.arange(0, C.BLOCK_M)
    o_n = j0 + tl.arange(0, C.BLOCK_N)
    b_k = load(k_rows, o_n, C.BLOCK_D, False, C.EVEN)  # (N, D)
    b_v = load(v_rows, o_n, C.BLOCK_DV, False, C.EVEN)  # (N, Dv)
    dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([C.BLOCK_N, C.BLOCK_DV], 0.0, tl.float32)
    b_k_rest = load_rest(k_rows, o_n, C.BLOCK_D, C.BLOCK_REST, False, C.EVEN)
    b_v_rest = load_rest(v_rows, o_n, C.BLOCK_DV, C.BLOCK_DV_REST, False, C.EVEN)
    dk_rest, dv_rest = zeros_rest(C.BLOCK_N, C.BLOCK_REST), zeros_rest(C.BLOCK_N, C.BLOCK_DV_REST)

    tiles, together, times = 0, 1, group
    if C.BLOCKS:
        together = tl.where(tl.load(t + col.BLOCKS + 1) == 0, 1, group)
        times = group // together
        tiles = list_at(lists, tl.load(item + ITEM), tl.cdiv(band.q_len, C.BLOCK_M) * together, kv_head, t)
        lo, blocks = 0, tl.load(tiles + 1)
        hi = blocks * C.BLOCK_M
    else:
        j_last = tl.minimum(j0 + C.BLOCK_N, band.kv_len) - 1
        lo, hi = query_range(j0, j_last, band.offset, band.left, band.right, band.q_len)
        lo = lo // C.BLOCK_M * C.BLOCK_M
        blocks = tl.where(j0 < band.kv_len, tl.maximum(tl.cdiv(hi - lo, C.BLOCK_M), 0), 0)
    q_rows = rows_of(t, col.Q, kv_head * group, band.q_len, head_dim, C)
    do_rows = rows_of(t, col.DO, kv_head * group, band.q_len, value_dim, C)
    p_stats, stats_head = locate_vector(t, col.STATS)
    p_stats += kv_head * group * stats_head
    stored = None
    if C.STORE_DS:
        stored = stored_of(t, kv_head * group, C)
    # Loop over all pairs (head of the group, block of queries). Nested loops, or a second loop body for tiles without a
    # visibility test, need more registers than a thread has.
    time, at = 0, lo
    for _ in range(0, times * blocks):
        nth, i0, cut = query_tile(time, at, tiles, together, C)
        seq = Sequence(row=t, scalars=scalars, head=kv_head * group + nth, scale=first.scale, band=band)
        o_m = i0 + within
        b_q = load(next_head(q_rows, nth), o_m, C.BLOCK_D, False, C.EVEN)  # (M, D)
        # Load both tiles before the first product: then one proxy fence orders both copies (see ptx.py).
        b_do = load(next_head(do_rows, nth), o_m, C.BLOCK_DV, False, C.EVEN)  # (M, Dv)
        b_q_rest = load_rest(next_head(q_rows, nth), o_m, C.BLOCK_D, C.BLOCK_REST, False, C.EVEN)
        b_do_rest = load_rest(next_head(do_rows, nth), o_m, C.BLOCK_DV, C.BLOCK_DV_REST, False, C.EVEN)
        b_k = load_again(b_k, k_rows, o_n, C.BLOCK_D, C)
        s = rows_times_rows(b_k, b_k_rest, b_q, b_q_rest, C.BLOCK_N, C.BLOCK_M, C.BLOCK_REST, C)  # (N, M)
        s, slope = modify(s, o_m[None, :], o_n[:, None], seq, C)
        # Declare an alignment of 16 bytes; otherwise Triton 3.6 copies each thread's columns in units of four bytes.
        p_block = tl.multiple_of(p_stats + nth * stats_head + i0, 16)
        lse, delta = load_stats(p_block, tl.multiple_of(stats_head // 2, 4), within)
        # Keys beyond the last need no test, because their rows of dk and dv are set to 0 below; nor do queries, because
        # their lse makes P zero.
        seen = visible_to(o_n[:, None], i0, within[None, :], band, C)
        seen = unskipped(seen, o_m[None, :], o_n[:, None], cut, seq, C)
        p = tl.where(seen, probabilities(s, lse[None, :]), 0.0)
        b_v = load_again(b_v, v_rows, o_n, C.BLOCK_DV, C)
        b_do = load_again(b_do, next_head(do_rows, nth), o_m, C.BLOCK_DV, C)
        dp = rows_times_rows(b_v, b_v_rest, b_do, b_do_rest, C.BLOCK_N, C.BLOCK_M, C.BLOCK_DV_REST, C)  # (N, M)
        if C.LEVEL == 2:
            z = tl.trans(dropout_factor(o_m, j0, seq, C))
            weights = cast(p * z, C.DTYPE)
            dp = dp * z
        else:
            weights = cast(p, C.DTYPE)
        dv = dot(weights, b_do, dv, C.TF32)
        dv_rest = add_rest(dv_rest, weights, b_do_rest, C.BLOCK_DV_REST, C)
        ds = cast(softmax_gradient(p, dp, delta[None, :], slope, C), C.DTYPE)
        b_q = load_again(b_q, next_head(q_rows, nth), o_m, C.BLOCK_D, C)
        dk = dot(ds, b_q, dk, C.TF32)
        dk_rest = add_rest(dk_rest, ds, b_q_rest, C.BLOCK_REST, C)
        if C.STORE_DS:
            tl.store(places_of_ds(next_stored(stored, nth), i0, j0, C), tl.trans(ds))
        at += C.BLOCK_M
        time += tl.where(at >= hi, 1, 0)
        at = tl.where(at >= hi, lo, at)

    kv_rows = tl.load(t + col.KV_ROWS)
    valid = o_n[:, None] < band.kv_len
    if tl.load(t + col.DV) != 0:
        dv_rows = rows_of(t, col.DV, kv_head, kv_rows, value_dim, C)
        store(dv_rows, o_n, tl.where(valid, cast(dv, C.DTYPE), 0.0), C.BLOCK_DV, C.EVEN)
        if C.BLOCK_DV_REST:
            rest = tl.where(valid, cast(dv_rest, C.DTYPE), 0.0)
            store_rest(dv_rows, o_n, rest, C.BLOCK_DV, C.BLOCK_DV_REST, C.EVEN)
    if tl.load(t + col.DK) != 0:
        dk_rows = rows_of(t, col.DK, kv_head, kv_rows, head_dim, C)
        store(dk_rows, o_n, tl.where(valid, cast(dk * first.scale, C.DTYPE), 0.0), C.BLOCK_D, C.EVEN)
        if C.BLOCK_REST:
            rest = tl.where(valid, cast(dk_rest * first.scale, C.DTYPE), 0.0)
            store_rest(dk_rows, o_n, rest, C.BLOCK_D, C.BLOCK_REST, C.EVEN)


@triton.jit
def gather_keys(dq, dq_rest, block, tiles, seq, lo, hi, FULL: tl.constexpr, C: tl.constexpr):
    """Return dq (M, D) of a QueryBlock, in two parts, plus the contribution of keys [lo, hi), a tile at a time.

    FULL, lo and hi are as in `attend_keys`.
    """
    o_m = block.queries
    within = tl.arange(0, C.BLOCK_N)
    for at in range(lo, hi, C.BLOCK_N):
        j0, cut = key_tile(at, tiles.listed, C)
        o_n = j0 + within
        b_k = load(tiles.k, o_n, C.BLOCK_D, FULL, C.EVEN)  # (N, D)
        b_v = load(tiles.v, o_n, C.BLOCK_DV, FULL, C.EVEN)  # (N, Dv)
        b_k_rest = load_rest(tiles.k, o_n, C.BLOCK_D, C.BLOCK_REST, FULL, C.EVEN)
        b_v_rest = load_rest(tiles.v, o_n, C.BLOCK_DV, C.BLOCK_DV_REST, FULL, C.EVEN)
        b_q = load_again(block.q, block.q_rows, o_m, C.BLOCK_D, C)
        s = rows_times_rows(b_q, block.rest, b_k, b_k_rest, C.BLOCK_M, C.BLOCK_N, C.BLOCK_REST, C)  # (M, N)
        s, slope = modify(s, o_m[:, None], o_n[None, :], seq, C)
        p = probabilities(s, block.lse[:, None])
        if not FULL:
            seen = visible(o_m[:, None], j0, within[None, :], seq.band, C)
            p = tl.where(unskipped(seen, o_m[:, None], o_n[None, :], cut, seq, C), p, 0.0)
        b_do = load_again(block.do, block.do_rows, o_m, C.BLOCK_DV, C)
        b_v = load_again(b_v, tiles.v, o_n, C.BLOCK_DV, C)
        dp = rows_times_rows(b_do, block.do_rest, b_v, b_v_rest, C.BLOCK_M, C.BLOCK_N, C.BLOCK_DV_REST, C)  # (M, N)
        if C.LEVEL == 2:
            dp = dp * dropout_factor(o_m, j0, seq, C)
        ds = cast(softmax_gradient(p, dp, block.delta[:, None], slope, C), C.DTYPE)
        b_k = load_again(b_k, tiles.k, o_n, C.BLOCK_D, C)
        dq = dot(ds, b_k, dq, C.TF32)
        dq_rest = add_rest(dq_rest, ds, b_k_rest, C.BLOCK_REST, C)
    return dq, dq_rest


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_q(table, floats, items, lists, heads, head_dim, value_dim, C: tl.constexpr):
    """Store dq of a block of queries.

    Grid: items × `heads`, the launch's largest number of query heads, or if packed, of key/value heads.
    """
    item = items + (tl.program_id(0) // heads) * (ITEM + 1 if C.BLOCKS else ITEM)
    nth = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * col.WIDTH
    group = tl.load(t + col.GROUP).to(tl.int32)
    if nth * (group if C.PACKED else 1) >= tl.load(t + col.HEADS):
        return
    scalars = floats + row * col.SCALARS
    at = block_at(tl.load(item + 1), nth, group, C)
    seq = load_sequence(t, scalars, heads_column(at, C))
    q_len, kv_len = seq.band.q_len, seq.band.kv_len

    q_rows = rows_of(t, col.Q, seq.head, q_len, head_dim, C)
    do_rows = rows_of(t, col.DO, seq.head, q_len, value_dim, C)
    k_rows = rows_of(t, col.K, at.kv_head, kv_len, head_dim, C)
    v_rows = rows_of(t, col.V, at.kv_head, kv_len, value_dim, C)
    o_m = at.queries
    b_q = load(q_rows, o_m, C.BLOCK_D, False, C.EVEN)  # (M, D)
    b_do = load(do_rows, o_m, C.BLOCK_DV, False, C.EVEN)  # (M, Dv)
    p_stats, stats_head = locate_vector(t, col.STATS)
    p_stats += at.heads * stats_head
    if C.PACKED:  # A packed block may reach beyond the whole blocks that `attention_delta` wrote.
        lse = tl.load(p_stats + o_m, mask=o_m < q_len, other=float("inf"))
        delta = tl.load(p_stats + stats_head // 2 + o_m, mask=o_m < q_len, other=0.0)
    else:
        lse, delta = load_stats(p_stats, stats_head // 2, o_m)
    b_rest = load_rest(q_rows, o_m, C.BLOCK_D, C.BLOCK_REST, False, C.EVEN)
    b_do_rest = load_rest(do_rows, o_m, C.BLOCK_DV, C.BLOCK_DV_REST, False, C.EVEN)
    block = QueryBlock(
        queries=o_m, q=b_q, rest=b_rest, do=b_do, do_rest=b_do_rest, lse=lse, delta=delta, q_rows=q_rows,
        do_rows=do_rows,
    )  # fmt: skip
    dq, dq_rest = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32), zeros_rest(C.BLOCK_M, C.BLOCK_REST)

    listed = 0
    if C.BLOCKS:
        listed = list_at(lists, tl.load(item + ITEM), tl.cdiv(kv_len, C.BLOCK_N), nth, t)
        lo, full_lo, full_hi, hi = listed_stretches(listed, C)
    else:
        lo, full_lo, full_hi, hi = key_stretches(at.first, at.last, seq.band, 0, kv_len, C)
    tiles = KeysAndValues(k=k_rows, v=v_rows, pages=0, listed=listed)
    if C.LEVEL >= 1 and not C.BLOCKS:
        dq, dq_rest = gather_keys(dq, dq_rest, block, tiles, seq, lo, full_lo, False, C)
    dq, dq_rest = gather_keys(dq, dq_rest, block, tiles, seq, full_lo, full_hi, True, C)
    dq, dq_rest = gather_keys(dq, dq_rest, block, tiles, seq, full_hi, hi, False, C)

    dq = tl.where(o_m[:, None] < q_len, dq * seq.scale, 0.0)
    dq_rows = rows_of(t, col.DQ, seq.head, tl.load(t + col.Q_ROWS), head_dim, C)
    store(dq_rows, o_m, cast(dq, C.DTYPE), C.BLOCK_D, C.EVEN)
    if C.BLOCK_REST:
        rest = tl.where(o_m[:, None] < q_len, dq_rest * seq.scale, 0.0)
        store_rest(dq_rows, o_m, cast(rest, C.DTYPE), C.BLOCK_D, C.BLOCK_REST, C.EVEN)
