"""The forward kernel for Hopper: tiles by the copy engine (TMA), warps with roles. Level 0, 16-bit, aligned rows alone.

One warp loads; two groups of four warps each multiply half of the block of queries, so that the softmax of one runs
beside the products of the other; and within a group the scores of a tile are asked for before the values of the tile
before it, so that its softmax runs beside a product of its own, too (FlashAttention-3, Shah et al. 2024, §3.1, §3.2).
Triton's language cannot say that; Gluon, the language of its own lower level, can. Notation as in forward.py.

A group goes through its tiles from the last to the first: those that need a test of visibility come first.
"""

import triton.language as tl

from flashpoint_kernels.triton_backend import table as c
from flashpoint_kernels.triton_backend.forward import ITEM, online_softmax
from flashpoint_kernels.triton_backend.gluon import copy, gl, hopper, jit, mbarrier, multiply, tma, wait_for
from flashpoint_kernels.triton_backend.interpret import cast
from flashpoint_kernels.triton_backend.scores import LN2, LOG2E, visible
from flashpoint_kernels.triton_backend.tiles import key_stretches, load_sequence, locate, locate_vector


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_forward_hopper(
    table, floats, items, heads, head_dim, value_dim,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """o and lse of one work item and head, as `attention_forward` gives them; no part of a split problem.

    STAGES: tiles of keys, and of values, that are in shared memory at a time.
    """
    seq, work, cut = find_queries(table, floats, items, heads, ITEM, BLOCK_M, BLOCK_N)
    t, head, _i0, _lo, _count = work
    q_len, kv_len = seq[4][0], seq[4][1]
    kv_head = head // gl.load(t + c.GROUP).to(gl.int32)
    q_rows = describe(t, c.Q, head, q_len, head_dim, DTYPE, BLOCK_M, BLOCK_D)
    k_rows = describe(t, c.K, kv_head, kv_len, head_dim, DTYPE, BLOCK_N, BLOCK_D)
    v_rows = describe(t, c.V, kv_head, kv_len, value_dim, DTYPE, BLOCK_N, BLOCK_DV)
    tiles = (room(q_rows, 1, DTYPE), room(k_rows, STAGES, DTYPE), room(v_rows, STAGES, DTYPE))
    barriers = (signals(1, 1), signals(STAGES, 1), signals(STAGES, 1), signals(STAGES, 2), signals(STAGES, 2))
    hopper.fence_async_shared()  # the copy engine sees the barriers as they are now
    gl.warp_specialize(
        [
            (attend, (tiles, barriers, work, seq, value_dim, cut, 0, DTYPE, BLOCK_M, BLOCK_N, BLOCK_DV, EVEN, STAGES)),
            (attend, (tiles, barriers, work, seq, value_dim, cut, 1, DTYPE, BLOCK_M, BLOCK_N, BLOCK_DV, EVEN, STAGES)),
            (bring, (tiles, barriers, work, q_rows, k_rows, v_rows, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def find_queries(
    table, floats, items, heads, ITEM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(sequence, work, cut) of a program that goes through the keys of a block of queries.

    work: (table row, head, first query, first key, number of tiles of keys), of which the last `cut` need a test of
    visibility. A program whose sequence has no such head takes a block beyond the last query: it sees nothing and
    stores nothing.
    """
    item = items + (gl.program_id(0) // heads) * ITEM
    head = gl.program_id(0) % heads
    row = gl.load(item).to(gl.int64)
    t = table + row * c.WIDTH
    seq = load_sequence(t, floats + row * c.SCALARS, head)
    i0 = gl.where(head < gl.load(t + c.HEADS), gl.load(item + 1), gl.load(t + c.Q_ROWS).to(gl.int32))
    lo, _full_lo, full_hi, hi = key_stretches(i0, seq[4], 0, seq[4][1], 0, BLOCK_M, BLOCK_N)
    count = (hi - lo + BLOCK_N - 1) // BLOCK_N
    return seq, (t, head, i0, lo, count), count - (full_hi - lo) // BLOCK_N


@jit
def describe(t, TENSOR: tl.constexpr, head, count, dim, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """A descriptor of a head's `count` rows of `dim`, for tiles of (ROWS, BLOCK_D): 0 beyond.

    The copy engine reads it: what comes so holds no registers and has its addresses computed nowhere. Not every tensor
    can be described, see `Table.describable`.
    """
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], DTYPE)
    base, head_stride, stride = locate(t, TENSOR, DTYPE, True)
    base += head * head_stride
    return tma.make_tensor_descriptor(base, [gl.maximum(count, 1), dim], [stride, 1], [ROWS, BLOCK_D], LAYOUT)


@jit
def room(rows, STAGES: tl.constexpr, DTYPE: tl.constexpr):
    """Shared memory for that many tiles of a descriptor."""
    SHAPE: tl.constexpr = [STAGES] + rows.block_type.shape  # noqa: RUF005 -- Gluon has no such list
    return gl.allocate_shared_memory(DTYPE, SHAPE, rows.layout)


@jit
def signals(NUMBER: tl.constexpr, ARRIVALS: tl.constexpr):
    """Barriers in shared memory, each of whose phases ends with that many arrivals (and what was said to come).

    With one they say that a copy has come; with two, that both groups have done with a tile.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(at), count=ARRIVALS)
    return barriers


@jit
def bring(tiles, barriers, work, q_rows, k_rows, v_rows, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """The loading warp: the queries, then keys and values tile by tile."""
    q, k, v = tiles
    q_full, k_full, v_full, k_free, v_free = barriers
    _t, _head, i0, _lo, count = work
    if count > 0:
        mbarrier.expect(q_full.index(0), q_rows.block_type.nbytes)
        copy(q_rows, [i0, 0], q_full.index(0), q.index(0))
    bring_keys((k_rows, k, k_full, k_free), (v_rows, v, v_full, v_free), work, BLOCK_N, STAGES)


@jit
def bring_keys(first, second, work, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """A tile of each in turn, from the last keys on, once both groups have done with what was in its place.

    first, second: (descriptor, room, signals that a tile has come, signals that its place is free).
    """
    _t, _head, _i0, lo, count = work
    for n in range(count):
        j0 = lo + (count - 1 - n) * BLOCK_N
        bring_tile(first, j0, n, STAGES)
        bring_tile(second, j0, n, STAGES)


@jit
def bring_tile(which, j0, n, STAGES: tl.constexpr):
    rows, tiles, full, free = which
    at, phase = n % STAGES, (n // STAGES) & 1
    mbarrier.wait(free.index(at), phase ^ 1)
    mbarrier.expect(full.index(at), rows.block_type.nbytes)
    copy(rows, [j0, 0], full.index(at), tiles.index(at))


@jit
def attend(
    tiles, barriers, work, seq, value_dim, cut,
    HALF: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of warps that multiplies: o and lse of half of the block's queries."""
    S: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])  # noqa: E741
    P: tl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: tl.constexpr = BLOCK_M // 2
    _q, _k, v = tiles
    q_full, k_full, v_full, _k_free, _v_free = barriers
    t, head, i0, _lo, count = work
    i0 += HALF * ROWS
    o_m = i0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    denom = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    acc = gl.full([ROWS, BLOCK_DV], 0.0, gl.float32, O)
    if count > 0:
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(k_full.index(0), 0)
        s = wait_for(0, [ask_scores(tiles, 0, HALF, ROWS, BLOCK_N, STAGES, S)])
        p, m, denom, _shrink = weigh(s, m, denom, o_m, barriers, work, seq, 0, True, BLOCK_N, STAGES, S)
        p = gl.convert_layout(cast(p, DTYPE), P)
        for n in range(1, cut):
            p, m, denom, acc = step(
                p, m, denom, acc, o_m, tiles, barriers, work, seq, n, True, HALF, DTYPE, ROWS, BLOCK_N, STAGES, S, O, P
            )
        for n in range(gl.maximum(cut, 1), count):
            p, m, denom, acc = step(
                p, m, denom, acc, o_m, tiles, barriers, work, seq, n, False, HALF, DTYPE, ROWS, BLOCK_N, STAGES, S, O, P
            )
        last = count - 1
        mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
        acc, p = wait_for(0, [multiply(p, v.index(last % STAGES), acc, is_async=True), p])

    denom = gl.where(denom == 0.0, 1.0, denom)  # no key: m is −inf, so o = 0 and lse = −inf
    q_len, q_rows = seq[4][0], gl.load(t + c.Q_ROWS)
    lse = gl.where(o_m < q_len, (m + gl.log2(denom)) * LN2, float("-inf"))
    lse_base, lse_head = locate_vector(t, c.LSE)
    wanted_rows = gl.where(gl.load(t + c.LSE) != 0, q_rows, 0)
    gl.store(lse_base + head * lse_head + o_m, lse, mask=o_m < wanted_rows)
    o = acc / gl.convert_layout(denom, gl.SliceLayout(1, O))[:, None]
    store_rows(o, t, c.O, head, i0, q_len, q_rows, value_dim, DTYPE, ROWS, BLOCK_DV, EVEN)


@jit
def store_rows(
    x, t, TENSOR: tl.constexpr, head, first, count, rows, dim,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write x (ROWS, BLOCK_D) from row `first` of a head on, below `rows`; rows from `count` on are padding, and 0."""
    W: tl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])  # 16 bytes a thread
    x = gl.convert_layout(cast(x, DTYPE), W)
    o_m = first + gl.arange(0, ROWS, gl.SliceLayout(1, W))
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, W))
    x = gl.where((o_m < count)[:, None], x, 0.0)
    base, head_stride, stride = locate(t, TENSOR, DTYPE, True)
    inside = (o_m < rows)[:, None]
    if not EVEN:
        inside = inside & (o_d < dim)[None, :]
    gl.store(base + head * head_stride + o_m[:, None] * stride + o_d[None, :], x, mask=inside)


@jit
def step(
    p, m, denom, acc, o_m, tiles, barriers, work, seq, n,
    CUT: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, S: tl.constexpr, O: tl.constexpr, P: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """The scores of tile n beside the values of tile n − 1, whose probabilities are p: (p, m, denom, acc) for the next.

    Its keys have come. CUT: it needs a test of visibility.
    """
    _q, _k, v = tiles
    _q_full, _k_full, v_full, _k_free, v_free = barriers
    before = n - 1
    scores = ask_scores(tiles, n, HALF, ROWS, BLOCK_N, STAGES, S)
    mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
    values = multiply(p, v.index(before % STAGES), acc, is_async=True)
    s = wait_for(1, [scores])  # of the two products the first
    weights, m, denom, shrink = weigh(s, m, denom, o_m, barriers, work, seq, n, CUT, BLOCK_N, STAGES, S)
    acc, p = wait_for(0, [values, p])
    mbarrier.arrive(v_free.index(before % STAGES), count=1)
    p = gl.convert_layout(cast(weights, DTYPE), P)
    return p, m, denom, acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]


@jit
def ask_scores(
    tiles, n, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, S: tl.constexpr
):
    """The product of a group's queries with tile n of the keys, under way."""
    q, k, _v = tiles
    zeros = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S)
    mine = q.index(0).slice(HALF * ROWS, ROWS)
    return multiply(mine, k.index(n % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def weigh(
    s, m, denom, o_m, barriers, work, seq, n,
    CUT: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """(p, m, denom, shrink) of `online_softmax` for the scores of tile n, whose keys are free from now on.

    It ends with the wait for the keys of the next tile: ptxas moves nothing across that loop, and would otherwise move
    the wait for the values to the start of the softmax, which then had nothing to run beside.
    """
    _q_full, k_full, _v_full, k_free, _v_free = barriers
    _t, _head, _i0, lo, count = work
    mbarrier.arrive(k_free.index(n % STAGES), count=1)
    if CUT:
        within = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        j0 = lo + (count - 1 - n) * BLOCK_N
        s = gl.where(visible(o_m[:, None], j0, within[None, :], seq[4], 0), s, float("-inf"))
    p, m, denom, shrink = online_softmax(s, seq[3] * LOG2E, m, denom)
    after = n + 1
    mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=after < count)
    return p, m, denom, shrink
