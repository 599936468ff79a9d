"""The backward kernels for Hopper, in hopper.py's manner: a warp loads, two groups of warps multiply half a block each.

The terms are backward.py's. P is computed beside the product dP, and dS beside dV; or, for dQ, both beside the product
of the tile before.
"""

import triton.language as tl

from flashpoint_kernels.bounds import full_query_range_jit as full_query_range
from flashpoint_kernels.bounds import query_range_jit as query_range
from flashpoint_kernels.triton_backend import table as c
from flashpoint_kernels.triton_backend.backward import ITEM
from flashpoint_kernels.triton_backend.gluon import copy, gl, hopper, jit, mbarrier, multiply, tma, wait_for
from flashpoint_kernels.triton_backend.hopper import bring_keys, describe, find_queries, room, signals, store_rows
from flashpoint_kernels.triton_backend.interpret import cast
from flashpoint_kernels.triton_backend.scores import LOG2E, probabilities, visible, visible_to
from flashpoint_kernels.triton_backend.tiles import load_sequence, locate, locate_vector


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_q_hopper(
    table, floats, items, heads, head_dim, value_dim,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head, as `attention_backward_q` gives it."""
    seq, work, cut = find_queries(table, floats, items, heads, ITEM, BLOCK_M, BLOCK_N)
    t, head, _i0, _lo, _count = work
    q_len, kv_len = seq[4][0], seq[4][1]
    kv_head = head // gl.load(t + c.GROUP).to(gl.int32)
    q_rows = describe(t, c.Q, head, q_len, head_dim, DTYPE, BLOCK_M, BLOCK_D)
    do_rows = describe(t, c.DO, head, q_len, value_dim, DTYPE, BLOCK_M, BLOCK_DV)
    k_rows = describe(t, c.K, kv_head, kv_len, head_dim, DTYPE, BLOCK_N, BLOCK_D)
    v_rows = describe(t, c.V, kv_head, kv_len, value_dim, DTYPE, BLOCK_N, BLOCK_DV)
    rows = (q_rows, do_rows, k_rows, v_rows)
    tiles = (room(q_rows, 1, DTYPE), room(do_rows, 1, DTYPE), room(k_rows, STAGES, DTYPE), room(v_rows, STAGES, DTYPE))
    barriers = (signals(1, 1), signals(STAGES, 1), signals(STAGES, 1), signals(STAGES, 2), signals(STAGES, 2))
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                gather_keys,
                (tiles, barriers, work, seq, head_dim, cut, 0, DTYPE, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, STAGES),
            ),
            (
                gather_keys,
                (tiles, barriers, work, seq, head_dim, cut, 1, DTYPE, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, STAGES),
            ),
            (bring, (tiles, barriers, work, rows, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def bring(tiles, barriers, work, rows, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """The loading warp of dQ: q and do, then values, which are done with first, and keys tile by tile."""
    q, do, k, v = tiles
    q_rows, do_rows, k_rows, v_rows = rows
    q_full, k_full, v_full, k_free, v_free = barriers
    _t, _head, i0, _lo, count = work
    if count > 0:
        mbarrier.expect(q_full.index(0), q_rows.block_type.nbytes + do_rows.block_type.nbytes)
        copy(q_rows, [i0, 0], q_full.index(0), q.index(0))
        copy(do_rows, [i0, 0], q_full.index(0), do.index(0))
    bring_keys((v_rows, v, v_full, v_free), (k_rows, k, k_full, k_free), work, BLOCK_N, STAGES)


@jit
def gather_keys(
    tiles, barriers, work, seq, head_dim, cut,
    HALF: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of warps that multiplies: dq of half of the block's queries."""
    ROWS: tl.constexpr = BLOCK_M // 2
    S: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    DQ: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DS: tl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    q_full, _k_full, v_full, _k_free, _v_free = barriers
    t, head, i0, _lo, count = work
    i0 += HALF * ROWS
    o_m = i0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    stats, half = locate_stats(t, head)
    needed = o_m < gl.where(count > 0, i0 + ROWS, 0)  # a head that there is not has no stats
    lse, delta = gl.load(stats + o_m, mask=needed), gl.load(stats + half + o_m, mask=needed)
    rows = (o_m, lse, delta)
    dq = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, DQ)
    ds = gl.full([ROWS, BLOCK_N], 0.0, DTYPE, DS)
    mbarrier.wait(q_full.index(0), 0, pred=count > 0)
    mbarrier.wait(v_full.index(0), 0, pred=count > 0)
    for n in range(0, cut):
        dq, ds = add_keys(
            dq, ds, rows, tiles, barriers, work, seq, n, True, HALF, DTYPE, ROWS, BLOCK_N, STAGES, S, DS
        )  # fmt: skip
    for n in range(cut, count):
        dq, ds = add_keys(
            dq, ds, rows, tiles, barriers, work, seq, n, False, HALF, DTYPE, ROWS, BLOCK_N, STAGES, S, DS
        )  # fmt: skip
    if count > 0:
        _q, _do, k, _v = tiles
        last = k.index((count - 1) % STAGES)
        dq, ds = wait_for(0, [multiply(ds, last, dq, use_acc=count > 1, is_async=True), ds])
    store_rows(dq * seq[3], t, c.DQ, head, i0, seq[4][0], gl.load(t + c.Q_ROWS), head_dim, DTYPE, ROWS, BLOCK_D, EVEN)


@jit
def add_keys(
    dq, ds, rows, tiles, barriers, work, seq, n,
    CUT: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, S: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    """dq with tile n − 1 of the keys, whose dS is ds, and the dS of tile n, whose values have come.

    Before the first there is none: what is computed then is never added to.
    """
    q, do, k, v = tiles
    _q_full, k_full, v_full, k_free, v_free = barriers
    _t, _head, _i0, lo, count = work
    o_m, lse, delta = rows
    at, phase = n % STAGES, (n // STAGES) & 1
    before = (n + STAGES - 1) % STAGES
    zeros = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S)
    mine = q.index(0).slice(HALF * ROWS, ROWS)
    mbarrier.wait(k_full.index(at), phase)
    scores = multiply(mine, k.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mine = do.index(0).slice(HALF * ROWS, ROWS)
    slopes = multiply(mine, v.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)
    dq = multiply(ds, k.index(before), dq, use_acc=n > 1, is_async=True)
    s = wait_for(2, [scores])
    p = probabilities(s * (seq[3] * LOG2E), lse[:, None])
    if CUT:
        within = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        j0 = lo + (count - 1 - n) * BLOCK_N
        p = gl.where(visible(o_m[:, None], j0, within[None, :], seq[4], 0), p, 0.0)
    after = n + 1  # here, not before the scores: see hopper.weigh
    mbarrier.wait(v_full.index(after % STAGES), (after // STAGES) & 1, pred=after < count)
    dp = wait_for(1, [slopes])
    mbarrier.arrive(v_free.index(at), count=1)
    weights = p * (dp - delta[:, None])
    dq, ds = wait_for(0, [dq, ds])
    mbarrier.arrive(k_free.index(before), count=1, pred=n > 0)
    return dq, gl.convert_layout(cast(weights, DTYPE), DS)


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_kv_hopper(
    table, floats, items, heads, head_dim, value_dim,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, as `attention_backward_kv` gives them."""
    item = items + (gl.program_id(0) // heads) * ITEM
    kv_head = gl.program_id(0) % heads
    row = gl.load(item).to(gl.int64)
    t = table + row * c.WIDTH
    group = gl.load(t + c.GROUP).to(gl.int32)
    seq = load_sequence(t, floats + row * c.SCALARS, kv_head)
    q_len, kv_len, offset, left, right = seq[4]
    # As in find_queries, a block beyond the last key where there is no such head.
    none = kv_head * group >= gl.load(t + c.HEADS)
    j0 = gl.where(none, gl.load(t + c.KV_ROWS).to(gl.int32), gl.load(item + 1))
    j_last = gl.minimum(j0 + BLOCK_N, kv_len) - 1
    lo, hi = query_range(j0, j_last, offset, left, right, q_len)
    full_lo, _full_hi = full_query_range(j0, j_last, offset, left, right, q_len)
    lo = lo // BLOCK_M * BLOCK_M
    blocks = gl.where(j0 < kv_len, gl.maximum((hi - lo + BLOCK_M - 1) // BLOCK_M, 0), 0)
    cut = gl.minimum(gl.maximum((full_lo - lo + BLOCK_M - 1) // BLOCK_M, 0), blocks)
    work = (t, kv_head, group, j0, lo, blocks)

    k_rows = describe(t, c.K, kv_head, kv_len, head_dim, DTYPE, BLOCK_N, BLOCK_D)
    v_rows = describe(t, c.V, kv_head, kv_len, value_dim, DTYPE, BLOCK_N, BLOCK_DV)
    q_rows = describe_group(t, c.Q, kv_head * group, group, q_len, head_dim, DTYPE, BLOCK_M, BLOCK_D)
    do_rows = describe_group(t, c.DO, kv_head * group, group, q_len, value_dim, DTYPE, BLOCK_M, BLOCK_DV)
    rows = (k_rows, v_rows, q_rows, do_rows)
    tiles = (room(k_rows, 1, DTYPE), room(v_rows, 1, DTYPE), room(q_rows, STAGES, DTYPE), room(do_rows, STAGES, DTYPE))
    barriers = (signals(1, 1), signals(STAGES, 1), signals(STAGES, 1), signals(STAGES, 2))
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (
                gather_queries,
                (
                    tiles, barriers, work, seq, head_dim, value_dim, cut,
                    0, DTYPE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN, STAGES,
                ),
            ),
            (
                gather_queries,
                (
                    tiles, barriers, work, seq, head_dim, value_dim, cut,
                    1, DTYPE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, EVEN, STAGES,
                ),
            ),
            (bring_queries, (tiles, barriers, work, rows, BLOCK_M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@jit
def describe_group(
    t, TENSOR: tl.constexpr, head, heads, count, dim,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A descriptor of `count` rows of `dim` of that many heads from `head` on, for tiles of (1, ROWS, BLOCK_D)."""
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([1, ROWS, BLOCK_D], DTYPE)
    base, head_stride, stride = locate(t, TENSOR, DTYPE, True)
    base += head * head_stride
    shape = [heads, gl.maximum(count, 1), dim]
    return tma.make_tensor_descriptor(base, shape, [head_stride, stride, 1], [1, ROWS, BLOCK_D], LAYOUT)


@jit
def bring_queries(tiles, barriers, work, rows, BLOCK_M: tl.constexpr, STAGES: tl.constexpr):
    """The loading warp of dK and dV: k and v, then q and do block by block, head by head of the group."""
    k, v, q, do = tiles
    k_rows, v_rows, q_rows, do_rows = rows
    k_full, q_full, do_full, free = barriers
    _t, _head, group, j0, lo, blocks = work
    if blocks > 0:
        mbarrier.expect(k_full.index(0), k_rows.block_type.nbytes + v_rows.block_type.nbytes)
        copy(k_rows, [j0, 0], k_full.index(0), k.index(0))
        copy(v_rows, [j0, 0], k_full.index(0), v.index(0))
    for n in range(group * blocks):
        at, phase = n % STAGES, (n // STAGES) & 1
        nth, i0 = n // blocks, lo + n % blocks * BLOCK_M
        mbarrier.wait(free.index(at), phase ^ 1)
        mbarrier.expect(q_full.index(at), q_rows.block_type.nbytes)
        copy(q_rows, [nth, i0, 0], q_full.index(at), q.index(at))
        mbarrier.expect(do_full.index(at), do_rows.block_type.nbytes)
        copy(do_rows, [nth, i0, 0], do_full.index(at), do.index(at))


@jit
def gather_queries(
    tiles, barriers, work, seq, head_dim, value_dim, cut,
    HALF: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of warps that multiplies: dk and dv of half of the block's keys."""
    ROWS: tl.constexpr = BLOCK_N // 2
    S: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DV: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    k_full, q_full, _do_full, _free = barriers
    t, kv_head, group, j0, _lo, blocks = work
    j0 += HALF * ROWS
    o_n = j0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    dk = gl.full([ROWS, BLOCK_D], 0.0, gl.float32, DK)
    dv = gl.full([ROWS, BLOCK_DV], 0.0, gl.float32, DV)
    mbarrier.wait(k_full.index(0), 0, pred=blocks > 0)
    mbarrier.wait(q_full.index(0), 0, pred=blocks > 0)
    for nth in range(group):
        for nth_block in range(0, cut):
            dk, dv = add_queries(
                dk, dv, o_n, tiles, barriers, work, seq, nth, nth_block,
                True, HALF, DTYPE, ROWS, BLOCK_M, STAGES, S, DK, DV,
            )  # fmt: skip
        for nth_block in range(cut, blocks):
            dk, dv = add_queries(
                dk, dv, o_n, tiles, barriers, work, seq, nth, nth_block,
                False, HALF, DTYPE, ROWS, BLOCK_M, STAGES, S, DK, DV,
            )  # fmt: skip
    kv_len, kv_rows = seq[4][1], gl.load(t + c.KV_ROWS)
    dv_rows = gl.where(gl.load(t + c.DV) != 0, kv_rows, 0)
    dk_rows = gl.where(gl.load(t + c.DK) != 0, kv_rows, 0)
    store_rows(dv, t, c.DV, kv_head, j0, kv_len, dv_rows, value_dim, DTYPE, ROWS, BLOCK_DV, EVEN)
    store_rows(dk * seq[3], t, c.DK, kv_head, j0, kv_len, dk_rows, head_dim, DTYPE, ROWS, BLOCK_D, EVEN)


@jit
def add_queries(
    dk, dv, o_n, tiles, barriers, work, seq, nth, nth_block,
    CUT: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr, S: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dk and dv with a block of queries, whose q has come."""
    k, v, q, do = tiles
    _k_full, q_full, do_full, free = barriers
    t, kv_head, group, _j0, lo, blocks = work
    n = nth * blocks + nth_block
    i0 = lo + nth_block * BLOCK_M
    at, phase = n % STAGES, (n // STAGES) & 1
    b_q = q.index(at).reshape([BLOCK_M, q.shape[3]])
    b_do = do.index(at).reshape([BLOCK_M, do.shape[3]])
    within = gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))
    stats, half = locate_stats(t, kv_head * group + nth)
    zeros = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, S)
    scores = multiply(k.index(0).slice(HALF * ROWS, ROWS), b_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(at), phase)
    slopes = multiply(v.index(0).slice(HALF * ROWS, ROWS), b_do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = gl.load(stats + i0 + within)
    s = wait_for(1, [scores])
    # As in backward.py, not tested: keys beyond the last, and queries.
    weights = probabilities(s * (seq[3] * LOG2E), lse[None, :])
    if CUT:
        weights = gl.where(visible_to(o_n[:, None], i0, within[None, :], seq[4], 0), weights, 0.0)
    delta = gl.load(stats + half + i0 + within)
    p = gl.convert_layout(cast(weights, DTYPE), gl.DotOperandLayout(0, DV, 2))
    after = n + 1  # here, not before the scores: see hopper.weigh
    mbarrier.wait(q_full.index(after % STAGES), (after // STAGES) & 1, pred=after < group * blocks)
    dv = multiply(p, b_do, dv, is_async=True)
    dp = wait_for(1, [slopes])
    ds = gl.convert_layout(cast(weights * (dp - delta[None, :]), DTYPE), gl.DotOperandLayout(0, DK, 2))
    dk = multiply(ds, b_q, dk, is_async=True)
    dk, dv, ds, p = wait_for(0, [dk, dv, ds, p])
    mbarrier.arrive(free.index(at), count=1)
    return dk, dv


@jit
def locate_stats(t, head):
    """(pointer to a head's lse, how far its delta is), as `attention_delta` left them: to 16 bytes, whole blocks."""
    base, head_stride = locate_vector(t, c.STATS)
    return tl.multiple_of(base + head * head_stride, 16), tl.multiple_of(head_stride // 2, 4)
