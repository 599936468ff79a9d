"""The backward kernels for Hopper: one warp loads, and two groups of warps multiply half a block each.

The names are those of ../kernels/backward.py. The kernel for dK and dV computes P while the product dP runs, and dS
while the product dV runs. The kernel for dQ computes P and dS of a tile while the product dS·K of the previous tile
runs.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashpoint_kernels.triton_backend.hopper.gluon import gl, hopper, jit, mbarrier, tma_load, wgmma, wgmma_wait
from flashpoint_kernels.triton_backend.hopper.pipeline import (
    Launched,
    Pipe,
    QueryWork,
    barriers,
    carried,
    descriptor,
    find_queries,
    first_key,
    group_descriptor,
    group_stages,
    load_keys,
    load_tile,
    operand,
    operand_layout,
    product_layout,
    release,
    stages,
    store_rows,
    wait_empty,
    wait_full,
)
from flashpoint_kernels.triton_backend.hopper.stored import store_ds
from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.backward import ITEM
from flashpoint_kernels.triton_backend.kernels.bounds import full_query_range, query_range
from flashpoint_kernels.triton_backend.kernels.groups import Sequence
from flashpoint_kernels.triton_backend.kernels.interpret import cast
from flashpoint_kernels.triton_backend.kernels.scores import LOG2E, probabilities, visible, visible_to
from flashpoint_kernels.triton_backend.kernels.tiles import load_sequence, locate_vector, rows_of, stored_of


class QueryPipes(NamedTuple):
    """The pipes of the kernel for dQ.

    q and do stay in shared memory for the whole block. q's barrier signals the arrival of both, so `do` is no Pipe, but
    only the shared memory of its tile.
    """

    q: Pipe
    do: Any
    k: Pipe
    v: Pipe


class QueryGroup(NamedTuple):
    """A group of warps that multiplies half of a block of queries.

    o_m, lse in base 2, and delta are (M / 2,). q and do are in shared memory.
    """

    o_m: Any
    lse: Any
    delta: Any
    q: Any
    do: Any
    pipes: QueryPipes
    work: QueryWork
    seq: Sequence


class QueryGradient(NamedTuple):
    """The state of a block of dQ between two tiles.

    `dq` does not yet contain the last tile; `ds` is that tile's dS, in the form that `carried` returns.
    """

    dq: Any
    ds: Any


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_q_hopper(table, floats, items, heads, head_dim, value_dim, C: tl.constexpr):
    """Store dq of a block of queries of one head, as `attention_backward_q` does."""
    launched = Launched(
        table=table, floats=floats, items=items, heads=heads, head_dim=head_dim, value_dim=value_dim
    )  # fmt: skip
    seq, work = find_queries(launched, gl.program_id(0), 0, ITEM, C)
    q, do = stages(1, C.BLOCK_M, C.BLOCK_D, C), stages(1, C.BLOCK_M, C.BLOCK_DV, C)
    k, v = stages(C.STAGES, C.BLOCK_N, C.BLOCK_D, C), stages(C.STAGES, C.BLOCK_N, C.BLOCK_DV, C)
    q_full, k_full, v_full = barriers(1, 1), barriers(C.STAGES, 1), barriers(C.STAGES, 1)
    k_empty, v_empty = barriers(C.STAGES, 2), barriers(C.STAGES, 2)
    pipes = QueryPipes(
        q=Pipe(tiles=q, full=q_full, empty=None),
        do=do,
        k=Pipe(tiles=k, full=k_full, empty=k_empty),
        v=Pipe(tiles=v, full=v_full, empty=v_empty),
    )
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (query_consumer, (pipes, work, seq, head_dim, 0, C)),
            (query_consumer, (pipes, work, seq, head_dim, 1, C)),
            (query_producer, (pipes, work, seq, head_dim, value_dim, C)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def query_producer(pipes, work, seq, head_dim, value_dim, C: tl.constexpr):
    """Run the loading warp of dQ: load q and do, then for each tile its values and its keys."""
    t, head, band = seq.row, seq.head, seq.band
    if work.end > 0:
        kv_head = head // gl.load(t + col.GROUP).to(gl.int32)
        # Finish each descriptor before computing the next address: a thread of this warp has only 24 registers.
        q = descriptor(rows_of(t, col.Q, head, band.q_len, head_dim, C), C.BLOCK_M, C.BLOCK_D, C)
        do = descriptor(rows_of(t, col.DO, head, band.q_len, value_dim, C), C.BLOCK_M, C.BLOCK_DV, C)
        k = descriptor(rows_of(t, col.K, kv_head, band.kv_len, head_dim, C), C.BLOCK_N, C.BLOCK_D, C)
        v = descriptor(rows_of(t, col.V, kv_head, band.kv_len, value_dim, C), C.BLOCK_N, C.BLOCK_DV, C)
        full = pipes.q.full.index(0)
        mbarrier.expect(full, q.block_type.nbytes + do.block_type.nbytes)
        tma_load(q, [work.i0, 0], full, pipes.q.tiles.index(0))
        tma_load(do, [work.i0, 0], full, pipes.do.index(0))
        load_keys(v, pipes.v, k, pipes.k, work, C)


@jit
def query_consumer(pipes, work, seq, head_dim, HALF: tl.constexpr, C: tl.constexpr):
    """Run a group of warps that multiplies: compute dq of half of the block's queries."""
    ROWS: tl.constexpr = C.BLOCK_M // 2
    S: tl.constexpr = product_layout(C.BLOCK_N)
    DS: tl.constexpr = operand_layout(C.BLOCK_D)
    t, head = seq.row, seq.head
    i0 = work.i0 + HALF * ROWS
    o_m = i0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    p_stats, half = locate_stats(t, head)
    # A block that sees no key has `work.end` 0. It may be padding, for a head that this sequence does not have: do not
    # read its lse and delta.
    m_stats = o_m < gl.where(work.end > 0, i0 + ROWS, 0)
    lse, delta = gl.load(p_stats + o_m, mask=m_stats), gl.load(p_stats + half + o_m, mask=m_stats)
    q, do = pipes.q.tiles.index(0).slice(HALF * ROWS, ROWS), pipes.do.index(0).slice(HALF * ROWS, ROWS)
    group = QueryGroup(o_m=o_m, lse=lse, delta=delta, q=q, do=do, pipes=pipes, work=work, seq=seq)
    dq = gl.full([ROWS, C.BLOCK_D], 0.0, gl.float32, product_layout(C.BLOCK_D))
    ds = carried(gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, S), DS, C)
    running = QueryGradient(dq=dq, ds=ds)
    mbarrier.wait(pipes.q.full.index(0), 0, pred=work.end > 0)
    mbarrier.wait(pipes.v.full.index(0), 0, pred=work.end > 0)
    for n in range(0, work.cut):
        running = add_keys(running, group, n, True, C)
    for n in range(work.cut, work.end):
        running = add_keys(running, group, n, False, C)
    dq = running.dq
    if work.end > 0:
        last = pipes.k.tiles.index((work.end - 1) % C.STAGES)
        b_ds = operand(running.ds, DS, C)
        dq, _b_ds = wgmma_wait(0, [wgmma(b_ds, last, dq, use_acc=work.end > 1, is_async=True), b_ds])
    q_rows = gl.load(t + col.Q_ROWS)
    store_rows(dq * seq.scale, rows_of(t, col.DQ, head, q_rows, head_dim, C), i0, seq.band.q_len, C)


@jit
def add_keys(running, group, n, CUT: tl.constexpr, C: tl.constexpr):
    """Return QueryGradient: dq with tile n − 1 of the keys, and the dS of tile n. The values of tile n have arrived.

    For n = 0 there is no previous tile: multiply a dS of zeros with tile 0, which has arrived. The product for n = 1
    then overwrites the result (use_acc).
    """
    ROWS: tl.constexpr = C.BLOCK_M // 2
    S: tl.constexpr = product_layout(C.BLOCK_N)
    DS: tl.constexpr = operand_layout(C.BLOCK_D)
    pipes, work, seq = group.pipes, group.work, group.seq
    k, v = pipes.k, pipes.v
    at, before = n % C.STAGES, gl.maximum(n - 1, 0) % C.STAGES
    zeros = gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, S)
    wait_full(k, n, C)
    scores = wgmma(group.q, k.tiles.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)  # (M / 2, N)
    slopes = wgmma(group.do, v.tiles.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)  # (M / 2, N)
    b_ds = operand(running.ds, DS, C)
    dq = wgmma(b_ds, k.tiles.index(before), running.dq, use_acc=n > 1, is_async=True)
    s = wgmma_wait(2, [scores])
    p = probabilities(s * (seq.scale * LOG2E), group.lse[:, None])
    if CUT:
        within = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, S))
        j0 = first_key(n, work, C)
        p = gl.where(visible(group.o_m[:, None], j0, within[None, :], seq.band, C), p, 0.0)
    # Wait for the next tile here, not before its scores: ptxas moves no code across the wait. See
    # forward.tile_softmax.
    wait_full(v, n + 1, C, pred=n + 1 < work.end)
    dp = wgmma_wait(1, [slopes])
    release(v, n, C)
    ds = p * (dp - group.delta[:, None])
    dq, _b_ds = wgmma_wait(0, [dq, b_ds])
    mbarrier.arrive(k.empty.index(before), count=1, pred=n > 0)
    return QueryGradient(dq=dq, ds=carried(ds, DS, C))


class KeyPipes(NamedTuple):
    """The pipes of the kernel for dK and dV.

    k and v stay in shared memory for the whole block. k's barrier signals the arrival of both, so `v` is no Pipe, but
    only the shared memory of its tile. Consumers release a tile of q and of do together, by q's `empty` barrier.
    """

    k: Pipe
    v: Any
    q: Pipe
    do: Pipe


class KeyWork(NamedTuple):
    """A block of keys, and the blocks of queries that may see it, which each of the `group` query heads has.

    `j0` is the first key, `lo` the first query, `blocks` the number of blocks of queries of a head. The first `cut` of
    these blocks need a visibility test.
    """

    j0: Any
    lo: Any
    blocks: Any
    cut: Any
    group: Any


class KeyGroup(NamedTuple):
    """A group of warps that multiplies half of a block of keys o_n (N / 2,), which begins at j0.

    k and v are in shared memory, or with HOLD in registers. `stored` is the Stored of the group's first
    query head, and None without STORE_DS.
    """

    o_n: Any
    k: Any
    v: Any
    pipes: KeyPipes
    work: KeyWork
    seq: Sequence
    j0: Any
    stored: Any


class KeyGradients(NamedTuple):
    """The sums of dK and dV over the blocks of queries so far."""

    dk: Any
    dv: Any


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_kv_hopper(table, floats, items, heads, head_dim, value_dim, C: tl.constexpr):
    """Store dk and dv of a block of keys, as `attention_backward_kv` does. STORE_DS: store dS, too (see stored.py)."""
    launched = Launched(
        table=table, floats=floats, items=items, heads=heads, head_dim=head_dim, value_dim=value_dim
    )  # fmt: skip
    seq, work = find_keys(launched, C)
    k, v = stages(1, C.BLOCK_N, C.BLOCK_D, C), stages(1, C.BLOCK_N, C.BLOCK_DV, C)
    q, do = group_stages(C.STAGES, C.BLOCK_M, C.BLOCK_D, C), group_stages(C.STAGES, C.BLOCK_M, C.BLOCK_DV, C)
    k_full, q_full, do_full = barriers(1, 1), barriers(C.STAGES, 1), barriers(C.STAGES, 1)
    empty = barriers(C.STAGES, 2)
    pipes = KeyPipes(
        k=Pipe(tiles=k, full=k_full, empty=None),
        v=v,
        q=Pipe(tiles=q, full=q_full, empty=empty),
        do=Pipe(tiles=do, full=do_full, empty=None),
    )
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (key_consumer, (pipes, work, seq, head_dim, value_dim, 0, C)),
            (key_consumer, (pipes, work, seq, head_dim, value_dim, 1, C)),
            (key_producer, (pipes, work, seq, head_dim, value_dim, C)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def find_keys(launched, C: tl.constexpr):
    """Return (Sequence of a key/value head, KeyWork) of a program.

    If the sequence has fewer heads than the launch, and not this one, return a block beyond the last key: no query sees
    it, and nothing is stored.
    """
    item = launched.items + (gl.program_id(0) // launched.heads) * ITEM
    kv_head = gl.program_id(0) % launched.heads
    row = gl.load(item).to(gl.int64)
    t = launched.table + row * col.WIDTH
    group = gl.load(t + col.GROUP).to(gl.int32)
    seq = load_sequence(t, launched.floats + row * col.SCALARS, kv_head)
    band = seq.band
    none = kv_head * group >= gl.load(t + col.HEADS)
    j0 = gl.where(none, gl.load(t + col.KV_ROWS).to(gl.int32), gl.load(item + 1))
    j_last = gl.minimum(j0 + C.BLOCK_N, band.kv_len) - 1
    lo, hi = query_range(j0, j_last, band.offset, band.left, band.right, band.q_len)
    full_lo, _full_hi = full_query_range(j0, j_last, band.offset, band.left, band.right, band.q_len)
    UNIT: tl.constexpr = 64 if C.STORE_DS else C.BLOCK_M  # store whole tiles of dS
    lo = lo // UNIT * UNIT
    blocks = gl.where(j0 < band.kv_len, gl.maximum((hi - lo + UNIT - 1) // UNIT * (UNIT // C.BLOCK_M), 0), 0)
    cut = gl.minimum(gl.maximum((full_lo - lo + C.BLOCK_M - 1) // C.BLOCK_M, 0), blocks)
    if C.STORE_DS:  # the dS of keys beyond the last must be 0: dQ multiplies it
        cut = gl.where(j0 + C.BLOCK_N > band.kv_len, blocks, cut)
    return seq, KeyWork(j0=j0, lo=lo, blocks=blocks, cut=cut, group=group)


@jit
def key_producer(pipes, work, seq, head_dim, value_dim, C: tl.constexpr):
    """Run the loading warp of dK and dV: load k and v, then q and do block by block, for each head of the group."""
    t, kv_head, band, heads = seq.row, seq.head, seq.band, work.group
    if work.blocks > 0:
        # As in query_producer, finish each descriptor before the next address.
        k = descriptor(rows_of(t, col.K, kv_head, band.kv_len, head_dim, C), C.BLOCK_N, C.BLOCK_D, C)
        v = descriptor(rows_of(t, col.V, kv_head, band.kv_len, value_dim, C), C.BLOCK_N, C.BLOCK_DV, C)
        q_rows = rows_of(t, col.Q, kv_head * heads, band.q_len, head_dim, C)
        q = group_descriptor(q_rows, heads, C.BLOCK_M, C.BLOCK_D, C)
        do_rows = rows_of(t, col.DO, kv_head * heads, band.q_len, value_dim, C)
        do = group_descriptor(do_rows, heads, C.BLOCK_M, C.BLOCK_DV, C)
        full = pipes.k.full.index(0)
        mbarrier.expect(full, k.block_type.nbytes + v.block_type.nbytes)
        tma_load(k, [work.j0, 0], full, pipes.k.tiles.index(0))
        tma_load(v, [work.j0, 0], full, pipes.v.index(0))
        for n in range(heads * work.blocks):
            at = n % C.STAGES
            nth, i0 = n // work.blocks, work.lo + n % work.blocks * C.BLOCK_M
            wait_empty(pipes.q, n, C)
            load_tile(q, pipes.q.tiles.index(at), [nth, i0, 0], pipes.q.full.index(at))
            if pipes.do.empty is not None:  # its tiles are released apart from q's
                wait_empty(pipes.do, n, C)
            load_tile(do, pipes.do.tiles.index(at), [nth, i0, 0], pipes.do.full.index(at))


@jit
def key_consumer(pipes, work, seq, head_dim, value_dim, HALF: tl.constexpr, C: tl.constexpr):
    """Run a group of warps that multiplies: compute dk and dv of half of the block's keys."""
    ROWS: tl.constexpr = C.BLOCK_N // 2
    t, kv_head = seq.row, seq.head
    j0 = work.j0 + HALF * ROWS
    o_n = j0 + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(C.BLOCK_M)))
    k, v = pipes.k.tiles.index(0).slice(HALF * ROWS, ROWS), pipes.v.index(0).slice(HALF * ROWS, ROWS)
    stored = None
    if C.STORE_DS:
        stored = stored_of(t, kv_head * work.group, C)
    dk = gl.full([ROWS, C.BLOCK_D], 0.0, gl.float32, product_layout(C.BLOCK_D))
    dv = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, product_layout(C.BLOCK_DV))
    sums = KeyGradients(dk=dk, dv=dv)
    mbarrier.wait(pipes.k.full.index(0), 0, pred=work.blocks > 0)
    if C.HOLD:
        k, v = k.load(operand_layout(C.BLOCK_M)), v.load(operand_layout(C.BLOCK_M))
    group = KeyGroup(o_n=o_n, k=k, v=v, pipes=pipes, work=work, seq=seq, j0=j0, stored=stored)
    mbarrier.wait(pipes.q.full.index(0), 0, pred=work.blocks > 0)
    for nth in range(work.group):
        for nth_block in range(0, work.cut):
            sums = add_queries(sums, group, nth, nth_block, True, C)
        for nth_block in range(work.cut, work.blocks):
            sums = add_queries(sums, group, nth, nth_block, False, C)
    kv_len, kv_rows = seq.band.kv_len, gl.load(t + col.KV_ROWS)
    dv_length = gl.where(gl.load(t + col.DV) != 0, kv_rows, 0)
    dk_length = gl.where(gl.load(t + col.DK) != 0, kv_rows, 0)
    store_rows(sums.dv, rows_of(t, col.DV, kv_head, dv_length, value_dim, C), j0, kv_len, C)
    store_rows(sums.dk * seq.scale, rows_of(t, col.DK, kv_head, dk_length, head_dim, C), j0, kv_len, C)


@jit
def add_queries(sums, group, nth, nth_block, CUT: tl.constexpr, C: tl.constexpr):
    """Return KeyGradients with the contribution of a block of queries, whose q has arrived."""
    ROWS: tl.constexpr = C.BLOCK_N // 2
    S: tl.constexpr = product_layout(C.BLOCK_M)
    pipes, work, seq = group.pipes, group.work, group.seq
    n = nth * work.blocks + nth_block
    i0 = work.lo + nth_block * C.BLOCK_M
    at = n % C.STAGES
    q, do = pipes.q.tiles, pipes.do.tiles
    b_q = q.index(at).reshape([C.BLOCK_M, q.shape[3]])
    b_do = do.index(at).reshape([C.BLOCK_M, do.shape[3]])
    within = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, S))
    p_stats, half = locate_stats(seq.row, seq.head * work.group + nth)
    zeros = gl.full([ROWS, C.BLOCK_M], 0.0, gl.float32, S)
    scores = wgmma(group.k, b_q.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (N / 2, M)
    wait_full(pipes.do, n, C)
    slopes = wgmma(group.v, b_do.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (N / 2, M)
    lse = gl.load(p_stats + i0 + within)
    s = wgmma_wait(1, [scores])
    # As in ../kernels/backward.py, neither keys beyond the last nor queries beyond the last are tested.
    weights = probabilities(s * (seq.scale * LOG2E), lse[None, :])
    if CUT:
        seen = visible_to(group.o_n[:, None], i0, within[None, :], seq.band, C)
        if C.STORE_DS:
            seen = seen & (group.o_n < seq.band.kv_len)[:, None]
        weights = gl.where(seen, weights, 0.0)
    delta = gl.load(p_stats + half + i0 + within)
    p = gl.convert_layout(cast(weights, C.DTYPE), operand_layout(C.BLOCK_DV))
    # Wait for the next tile here, not before its scores: ptxas moves no code across the wait. See
    # forward.tile_softmax.
    wait_full(pipes.q, n + 1, C, pred=n + 1 < work.group * work.blocks)
    dv = wgmma(p, b_do, sums.dv, is_async=True)
    dp = wgmma_wait(1, [slopes])
    gradient = cast(weights * (dp - delta[None, :]), C.DTYPE)
    ds = gl.convert_layout(gradient, operand_layout(C.BLOCK_D))
    dk = wgmma(ds, b_q, sums.dk, is_async=True)
    if C.STORE_DS:
        store_ds(gradient, group.stored, group.j0, nth, i0, C)
    dk, dv, ds, p = wgmma_wait(0, [dk, dv, ds, p])
    release(pipes.q, n, C)
    return KeyGradients(dk=dk, dv=dv)


@jit
def locate_stats(t, head):
    """Return (pointer to a head's lse, distance in elements to its delta) in the output of `attention_delta`.

    Addresses are aligned to 16 bytes. The memory has whole blocks of queries, so a block is loaded without a mask.
    """
    base, head_stride = locate_vector(t, col.STATS)
    return tl.multiple_of(base + head * head_stride, 16), tl.multiple_of(head_stride // 2, 4)
