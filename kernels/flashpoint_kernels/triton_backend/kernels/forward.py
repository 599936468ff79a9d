"""The forward kernel: one program per block of queries (FlashAttention-2, Dao 2023, Algorithm 1).

Notation: p_ pointers, o_ offsets, m_ masks, b_ blocks; M queries and N keys of a tile; s scores and p probabilities; m
and denom the running maximum and denominator of a row (see groups.Softmax). The softmax is in base 2, and the scale is
part of the exponent in float32. t is the sequence's row of the table; C has the constants.
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.blocks import key_tile, list_at, listed_stretches, unskipped
from flashpoint_kernels.triton_backend.kernels.groups import Keys, KeysAndValues, Queries, Softmax
from flashpoint_kernels.triton_backend.kernels.interpret import cast, dot
from flashpoint_kernels.triton_backend.kernels.scores import LN2, LOG2E, keep, modify, visible
from flashpoint_kernels.triton_backend.kernels.tiles import (
    block_at,
    columns_from,
    heads_column,
    key_stretches,
    keys_of,
    load,
    load_keys,
    load_scales,
    load_sequence,
    locate_vector,
    pages_of,
    places_of,
    rows_of,
    store,
    widened,
)

# Columns of a work item: table row, first row of the block (see tiles.block_at), keys [lo, hi) of its part, and the
# part's scratch slot (-1: no split); with a block mask, also the position of its lists.
ITEM = tl.constexpr(5)


@triton.jit
def finite(m):
    """Return a row's maximum, or 0 for a row that has seen no key: −inf − 0 is not NaN, but −inf − −inf is."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def online_softmax(s, unit, m, denom):
    """Return (p, m, denom, factor for acc) after a step of the online softmax (Milakov and Gimelshein 2018).

    The scores in base 2 are s·unit, with unit > 0: the multiplication inside the exponent costs nothing, and the
    largest s has the largest score.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * unit)
    shift = finite(m_new)
    p = tl.exp2(s * unit - shift[:, None])
    shrink = tl.exp2(m - shift)
    return p, m_new, denom * shrink + tl.sum(p, 1), shrink


@triton.jit
def begun(t, heads, wanted, C: tl.constexpr):
    """Return the Softmax before the first key. A sink is a key without a value: it starts the denominator.

    `wanted` is true for the first part of a sequence's keys, so that its sink counts once. `heads`, `wanted` and the
    table rows `t` have one element per row (M,), or are scalars.
    """
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    denom = tl.full([C.BLOCK_M], 0.0, tl.float32)
    if C.LEVEL >= 1:
        has_sink = (tl.load(t + col.SINKS) != 0) & wanted & (heads >= 0)
        p_sinks = tl.load(t + col.SINKS).to(tl.pointer_type(tl.float32)) + heads
        m = tl.full([C.BLOCK_M], 0.0, tl.float32) + tl.load(p_sinks, mask=has_sink, other=float("-inf")) * LOG2E
        denom = tl.where(has_sink & (tl.arange(0, C.BLOCK_M) >= 0), 1.0, denom)
    return Softmax(m=m, denom=denom, acc=tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32))


@triton.jit
def attend_keys(softmax, block, tiles, seq, lo, hi, FULL: tl.constexpr, C: tl.constexpr):
    """Return the Softmax of Queries after keys [lo, hi), one tile of BLOCK_N at a time; lo is a multiple of BLOCK_N.

    FULL: every query may see every key. With a block mask, lo and hi are positions in the list of tiles, multiplied by
    BLOCK_N.
    """
    o_m, keys, values = block.queries, tiles.k, tiles.v
    within = tl.arange(0, C.BLOCK_N)
    for at in range(lo, hi, C.BLOCK_N):
        j0, cut = key_tile(at, tiles.listed, C)
        o_n = j0 + within
        places = places_of(j0, tiles.pages, seq.band.kv_len, C)
        b_k = load_keys(keys, places, C.BLOCK_D, FULL, C)  # (N, D)
        # Load both tiles before the first product: then one proxy fence orders both copies (see tools/ptx.py). Tiles of
        # wide heads do not fit into shared memory together, and their products need no fence.
        if C.BLOCK_D <= 256:
            b_v = load_keys(values, places, C.BLOCK_DV, FULL, C)  # (N, Dv)
        if C.KEYS is not None:
            # exact: every int8 and float8_e4m3fn value fits in bfloat16, whose significand has 8 bits, and in float16
            b_k = cast(widened(b_k, C), C.DTYPE)
        s = dot(block.q, tl.trans(b_k), tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32), C.TF32)  # (M, N)
        if C.BLOCK_REST:
            rest = Keys(
                rows=columns_from(keys.rows, C.BLOCK_D), page=keys.page, p_scale=keys.p_scale,
                scale_row=keys.scale_row, scale_page=keys.scale_page,
            )  # fmt: skip
            b_k_rest = load_keys(rest, places, C.BLOCK_REST, FULL, C)
            if C.KEYS is not None:
                b_k_rest = cast(widened(b_k_rest, C), C.DTYPE)
            s = dot(block.rest, tl.trans(b_k_rest), s, C.TF32)
        if C.KEYS is not None:
            s *= load_scales(keys, places, FULL, C)[None, :]
        unit = seq.scale * LOG2E
        if C.LEVEL >= 1:
            s, _ = modify(s, o_m[:, None], o_n[None, :], seq, C)
            unit = 1.0
        if not FULL:
            seen = visible(o_m[:, None], j0, within[None, :], seq.band, C)
            s = tl.where(unskipped(seen, o_m[:, None], o_n[None, :], cut, seq, C), s, float("-inf"))
        p, m, denom, shrink = online_softmax(s, unit, softmax.m, softmax.denom)
        acc = softmax.acc * shrink[:, None]
        if C.LEVEL == 2:
            if tl.load(seq.row + col.DROP_BELOW) > 0:
                p = tl.where(keep(o_m, j0, seq, C), p, 0.0)
        if C.BLOCK_D > 256:
            b_v = load_keys(values, places, C.BLOCK_DV, FULL, C)  # (N, Dv)
        if C.KEYS is not None:
            b_v = cast(widened(b_v, C) * load_scales(values, places, FULL, C)[:, None], C.DTYPE)
        acc = dot(cast(p, C.DTYPE), b_v, acc, C.TF32)  # (M, Dv)
        softmax = Softmax(m=m, denom=denom, acc=acc)
    return softmax


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_forward(table, floats, items, lists, part_o, part_lse, heads, head_dim, value_dim, C: tl.constexpr):
    """Store o and lse of one work item and head.

    Grid: work items × `heads`, the launch's largest number of query heads, or if packed, of key/value heads. table
    (rows, WIDTH) int64, floats (rows, SCALARS) float32, items (n, ITEM) int32, or with a block mask (n, ITEM + 1);
    lists: see blocks.py. Parts of problems that are split over keys are stored in part_o (slots, heads, BLOCK_M,
    BLOCK_DV) and part_lse (slots, heads, BLOCK_M), float32.
    """
    item = items + (tl.program_id(0) // heads) * (ITEM + 1 if C.BLOCKS else ITEM)
    nth = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * col.WIDTH
    group = tl.load(t + col.GROUP).to(tl.int32)
    if nth * (group if C.PACKED else 1) >= tl.load(t + col.HEADS):
        return
    scalars = floats + row * col.SCALARS
    block = block_at(tl.load(item + 1), nth, group, C)
    part_lo, part_hi = tl.load(item + 2), tl.load(item + 3)
    slot = tl.load(item + 4)
    seq = load_sequence(t, scalars, heads_column(block, C))

    q_rows = rows_of(t, col.Q, seq.head, seq.band.q_len, head_dim, C)
    keys = keys_of(t, col.K, col.K_PAGE, col.K_SCALE, block.kv_head, seq.band.kv_len, head_dim, C)
    values = keys_of(t, col.V, col.V_PAGE, col.V_SCALE, block.kv_head, seq.band.kv_len, value_dim, C)
    o_m = block.queries
    b_q = load(q_rows, o_m, C.BLOCK_D, False, C.EVEN)  # (M, D)
    b_rest = 0
    if C.BLOCK_REST:
        b_rest = load(columns_from(q_rows, C.BLOCK_D), o_m, C.BLOCK_REST, False, C.EVEN)

    softmax = begun(t, block.heads, part_lo == 0, C)
    listed = 0
    if C.BLOCKS:
        listed = list_at(lists, tl.load(item + ITEM), tl.cdiv(part_hi - part_lo, C.BLOCK_N), nth, t)
        lo, full_lo, full_hi, hi = listed_stretches(listed, C)
    else:
        lo, full_lo, full_hi, hi = key_stretches(block.first, block.last, seq.band, part_lo, part_hi, C)
    queries = Queries(queries=o_m, q=b_q, rest=b_rest)
    tiles = KeysAndValues(k=keys, v=values, pages=pages_of(t, C), listed=listed)
    if C.LEVEL >= 1 and not C.BLOCKS:
        softmax = attend_keys(softmax, queries, tiles, seq, lo, full_lo, False, C)
    softmax = attend_keys(softmax, queries, tiles, seq, full_lo, full_hi, True, C)
    softmax = attend_keys(softmax, queries, tiles, seq, full_hi, hi, False, C)

    o, lse = normalised(softmax)
    if C.LEVEL == 2:
        o *= tl.load(scalars + col.KEEP_SCALE)
    if slot >= 0:
        o_d = tl.arange(0, C.BLOCK_DV)
        part = slot.to(tl.int64) * heads + nth
        within = tl.arange(0, C.BLOCK_M)
        tl.store(part_lse + part * C.BLOCK_M + within, lse)
        tl.store(part_o + part * (C.BLOCK_M * C.BLOCK_DV) + within[:, None] * C.BLOCK_DV + o_d[None, :], o)
    else:
        store_answer(o, lse, t, block, seq.band.q_len, value_dim, C)


@triton.jit
def normalised(softmax):
    """Return o (M, Dv) and lse (M,) in base 2. Without a key or sink, m is −inf, so o = 0 and lse = −inf."""
    denom = tl.where(softmax.denom == 0.0, 1.0, softmax.denom)
    return softmax.acc / denom[:, None], softmax.m + tl.log2(denom)


@triton.jit
def store_answer(o, lse, t, block, q_len, value_dim, C: tl.constexpr):
    """Store o (M, Dv) and lse (M,), given in base 2, of a block of queries. Rows of padding get 0 and −inf."""
    o_m = block.queries
    q_rows = tl.load(t + col.Q_ROWS)
    o = tl.where(o_m[:, None] < q_len, o, 0.0)
    lse = tl.where(o_m < q_len, lse * LN2, float("-inf"))
    store(rows_of(t, col.O, heads_column(block, C), q_rows, value_dim, C), o_m, cast(o, C.DTYPE), C.BLOCK_DV, C.EVEN)
    wanted_rows = tl.where(tl.load(t + col.LSE) != 0, q_rows, 0)
    p_lse, lse_head = locate_vector(t, col.LSE)
    tl.store(p_lse + block.heads * lse_head + o_m, lse, mask=o_m < wanted_rows)


# Columns of a merge item: table row, first row of the block, first scratch slot, number of parts.
MERGE_ITEM = tl.constexpr(4)


@triton.jit(do_not_specialize=["heads", "value_dim"])
def merge_parts(table, items, part_o, part_lse, heads, value_dim, C: tl.constexpr):
    """Merge the parts of a block of queries in their order: o = Σ w·oₚ / Σ w with w = 2^(lseₚ − max)."""
    item = items + (tl.program_id(0) // heads) * MERGE_ITEM
    nth = tl.program_id(0) % heads
    t = table + tl.load(item).to(tl.int64) * col.WIDTH
    group = tl.load(t + col.GROUP).to(tl.int32)
    if nth * (group if C.PACKED else 1) >= tl.load(t + col.HEADS):
        return
    first, parts = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
    within = tl.arange(0, C.BLOCK_M)
    o_d = tl.arange(0, C.BLOCK_DV)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    denom = tl.full([C.BLOCK_M], 0.0, tl.float32)
    softmax = Softmax(m=m, denom=denom, acc=tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32))
    # Prefetch parts if four fit into shared memory: a block of few queries has many parts, one for 256 to 1024 keys.
    STAGES: tl.constexpr = 4 if C.BLOCK_M * C.BLOCK_DV <= 4096 else 1
    for n in tl.range(0, parts, num_stages=STAGES):
        part = (first + n) * heads + nth
        lse = tl.load(part_lse + part * C.BLOCK_M + within)
        o = tl.load(part_o + part * (C.BLOCK_M * C.BLOCK_DV) + within[:, None] * C.BLOCK_DV + o_d[None, :])
        m = tl.maximum(softmax.m, lse)
        shift = finite(m)
        weight, shrink = tl.exp2(lse - shift), tl.exp2(softmax.m - shift)
        acc = softmax.acc * shrink[:, None] + o * weight[:, None]
        softmax = Softmax(m=m, denom=softmax.denom * shrink + weight, acc=acc)
    o, lse = normalised(softmax)
    store_answer(o, lse, t, block_at(tl.load(item + 1), nth, group, C), tl.load(t + col.Q_LEN), value_dim, C)
