"""The gradients of wide heads (D or Dv above 128, at most 256) for Hopper, with dS stored as in stored.py.

    dV = Pᵀ dO        and dS, which is stored: one program per block of keys of one key/value head
    dK = scale·dSᵀ Q  one program per block of keys of one key/value head
    dQ = scale·dS K   one program per block of queries of one head: stored.attention_backward_q_stored_hopper

Two accumulators of a wide head need more registers than a group of warps has, so each kernel has one.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashpoint_kernels.triton_backend.hopper.backward import KeyGroup, find_keys, key_producer, locate_stats
from flashpoint_kernels.triton_backend.hopper.gluon import gl, hopper, jit, mbarrier, tma, tma_load, wgmma, wgmma_wait
from flashpoint_kernels.triton_backend.hopper.pipeline import (
    Launched,
    Pipe,
    barriers,
    group_descriptor,
    group_stages,
    operand_layout,
    product_layout,
    release,
    stages,
    store_rows,
    stored_layout,
    wait_empty,
    wait_full,
)
from flashpoint_kernels.triton_backend.hopper.stored import store_ds
from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.interpret import cast
from flashpoint_kernels.triton_backend.kernels.scores import LOG2E, probabilities, visible_to
from flashpoint_kernels.triton_backend.kernels.tiles import QUERIES, columns_from, rows_of, stored_of


class ValuePipes(NamedTuple):
    """The pipes of the kernel for dV. k and v stay; k's barrier is for both. q and do have C.STAGES stages."""

    k: Pipe
    v: Any
    q: Pipe
    do: Pipe


class ValueGradient(NamedTuple):
    """The sum of dV over the blocks of queries so far, in two halves of the columns.

    One accumulator of 256 columns needs 128 registers in a row: then ptxas moves it in each iteration.
    """

    first: Any
    second: Any


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_v_hopper(table, floats, items, heads, head_dim, value_dim, C: tl.constexpr):
    """Store dv of a block of keys, and its dS."""
    launched = Launched(
        table=table, floats=floats, items=items, heads=heads, head_dim=head_dim, value_dim=value_dim
    )  # fmt: skip
    seq, work = find_keys(launched, C)
    k, v = stages(1, C.BLOCK_N, C.BLOCK_D, C), stages(1, C.BLOCK_N, C.BLOCK_DV, C)
    q, do = group_stages(C.STAGES, C.BLOCK_M, C.BLOCK_D, C), group_stages(C.STAGES, C.BLOCK_M, C.BLOCK_DV, C)
    pipes = ValuePipes(
        k=Pipe(tiles=k, full=barriers(1, 1), empty=None),
        v=v,
        q=Pipe(tiles=q, full=barriers(C.STAGES, 1), empty=barriers(C.STAGES, 2)),
        do=Pipe(tiles=do, full=barriers(C.STAGES, 1), empty=barriers(C.STAGES, 2)),
    )
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (value_consumer, (pipes, work, seq, value_dim, 0, C)),
            (value_consumer, (pipes, work, seq, value_dim, 1, C)),
            (key_producer, (pipes, work, seq, head_dim, value_dim, C)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def value_consumer(pipes, work, seq, value_dim, HALF: tl.constexpr, C: tl.constexpr):
    """Run a group of warps that multiplies: compute dv and dS of half of the block's keys."""
    ROWS: tl.constexpr = C.BLOCK_N // 2
    t, kv_head = seq.row, seq.head
    j0 = work.j0 + HALF * ROWS
    o_n = j0 + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(C.BLOCK_M)))
    k, v = pipes.k.tiles.index(0).slice(HALF * ROWS, ROWS), pipes.v.index(0).slice(HALF * ROWS, ROWS)
    stored = stored_of(t, kv_head * work.group, C)
    HALF_DV: tl.constexpr = C.BLOCK_DV // 2
    zeros = gl.full([ROWS, HALF_DV], 0.0, gl.float32, product_layout(HALF_DV))
    dv = ValueGradient(first=zeros, second=zeros)
    mbarrier.wait(pipes.k.full.index(0), 0, pred=work.blocks > 0)
    group = KeyGroup(o_n=o_n, k=k, v=v, pipes=pipes, work=work, seq=seq, j0=j0, stored=stored)
    for nth in range(work.group):
        for nth_block in range(0, work.cut):
            dv = add_values(dv, group, nth, nth_block, True, C)
        for nth_block in range(work.cut, work.blocks):
            dv = add_values(dv, group, nth, nth_block, False, C)
    dv_length = gl.where(gl.load(t + col.DV) != 0, gl.load(t + col.KV_ROWS), 0)
    dv_rows = rows_of(t, col.DV, kv_head, dv_length, value_dim, C)
    store_rows(dv.first, dv_rows, j0, seq.band.kv_len, C)
    store_rows(dv.second, columns_from(dv_rows, HALF_DV), j0, seq.band.kv_len, C)


@jit
def add_values(dv, group, nth, nth_block, CUT: tl.constexpr, C: tl.constexpr):
    """Return dv with the contribution of a block of queries; store its dS."""
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
    wait_full(pipes.q, n, C)
    scores = wgmma(group.k, b_q.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (N / 2, M)
    wait_full(pipes.do, n, C)
    slopes = wgmma(group.v, b_do.permute((1, 0)), zeros, use_acc=False, is_async=True)  # (N / 2, M)
    lse = gl.load(p_stats + i0 + within)
    s = wgmma_wait(1, [scores])
    release(pipes.q, n, C)
    weights = probabilities(s * (seq.scale * LOG2E), lse[None, :])
    if CUT:
        seen = visible_to(group.o_n[:, None], i0, within[None, :], seq.band, C)
        weights = gl.where(seen & (group.o_n < seq.band.kv_len)[:, None], weights, 0.0)
    delta = gl.load(p_stats + half + i0 + within)
    HALF_DV: tl.constexpr = C.BLOCK_DV // 2
    p = gl.convert_layout(cast(weights, C.DTYPE), operand_layout(HALF_DV))
    first = wgmma(p, b_do.slice(0, HALF_DV, 1), dv.first, is_async=True)
    second = wgmma(p, b_do.slice(HALF_DV, HALF_DV, 1), dv.second, is_async=True)
    dp = wgmma_wait(2, [slopes])
    store_ds(cast(weights * (dp - delta[None, :]), C.DTYPE), group.stored, group.j0, nth, i0, C)
    first, second, p = wgmma_wait(0, [first, second, p])
    release(pipes.do, n, C)
    return ValueGradient(first=first, second=second)


class KeyStoredPipes(NamedTuple):
    """The pipes of the kernel for dK. A stage has 64 queries, and their dSᵀ. The barriers of `ds` are for both."""

    ds: Pipe
    q: Any


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_k_stored_hopper(table, floats, items, heads, head_dim, value_dim, C: tl.constexpr):
    """Store dk of a block of keys from the dS that `attention_backward_v_hopper` has stored.

    dK = scale·dSᵀ Q, summed over the heads of the group and over the queries, from the first to the last.
    """
    launched = Launched(
        table=table, floats=floats, items=items, heads=heads, head_dim=head_dim, value_dim=value_dim
    )  # fmt: skip
    seq, work = find_keys(launched, C)
    ds, q = group_stages(C.STAGES, C.BLOCK_N, 64, C), group_stages(C.STAGES, 64, C.BLOCK_D, C)
    full, empty = barriers(C.STAGES, 1), barriers(C.STAGES, 2)
    pipes = KeyStoredPipes(ds=Pipe(tiles=ds, full=full, empty=empty), q=q)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (key_stored_consumer, (pipes, work, seq, head_dim, 0, C)),
            (key_stored_consumer, (pipes, work, seq, head_dim, 1, C)),
            (key_stored_producer, (pipes, work, seq, head_dim, C)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def key_stored_producer(pipes, work, seq, head_dim, C: tl.constexpr):
    """Run the loading warp of dK: load queries and dSᵀ block by block, for each head of the group."""
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([1, C.BLOCK_N, 64], C.DTYPE)
    t, kv_head, band, heads = seq.row, seq.head, seq.band, work.group
    if work.blocks > 0:
        q_rows = rows_of(t, col.Q, kv_head * heads, band.q_len, head_dim, C)
        q = group_descriptor(q_rows, heads, 64, C.BLOCK_D, C)
        stored = stored_of(t, kv_head * heads, C)
        tiles = (stored.head // stored.row).to(gl.int32)  # of QUERIES queries of a head
        keys = (stored.row // QUERIES).to(gl.int32)
        ds = tma.make_tensor_descriptor(
            stored.base, [heads * tiles, keys, 64], [stored.row, 64, 1], [1, C.BLOCK_N, 64], LAYOUT
        )  # fmt: skip
        for n in range(heads * work.blocks):
            at = n % C.STAGES
            nth, i0 = n // work.blocks, work.lo + n % work.blocks * 64
            full = pipes.ds.full.index(at)
            wait_empty(pipes.ds, n, C)
            mbarrier.expect(full, ds.block_type.nbytes + q.block_type.nbytes)
            tma_load(ds, [nth * tiles + i0 // 64, work.j0, 0], full, pipes.ds.tiles.index(at))
            tma_load(q, [nth, i0, 0], full, pipes.q.index(at))


@jit
def key_stored_consumer(pipes, work, seq, head_dim, HALF: tl.constexpr, C: tl.constexpr):
    """Run a group of warps that multiplies: compute dk of half of the block's keys."""
    ROWS: tl.constexpr = C.BLOCK_N // 2
    j0 = work.j0 + HALF * ROWS
    dk = gl.full([ROWS, C.BLOCK_D], 0.0, gl.float32, product_layout(C.BLOCK_D))
    total = work.group * work.blocks
    wait_full(pipes.ds, 0, C, pred=total > 0)
    ds = read_ds(pipes, 0, HALF, C)
    for n in range(total):
        q = pipes.q.index(n % C.STAGES)
        product = wgmma(ds, q.reshape([64, C.BLOCK_D]), dk, is_async=True)
        following = gl.minimum(n + 1, total - 1)
        wait_full(pipes.ds, following, C)
        then = read_ds(pipes, following, HALF, C)
        dk, _ds = wgmma_wait(0, [product, ds])
        release(pipes.ds, n, C)
        ds = then
    kv_rows = gl.load(seq.row + col.KV_ROWS)
    dk_length = gl.where(gl.load(seq.row + col.DK) != 0, kv_rows, 0)
    dk_rows = rows_of(seq.row, col.DK, seq.head, dk_length, head_dim, C)
    store_rows(dk * seq.scale, dk_rows, j0, seq.band.kv_len, C)


@jit
def read_ds(pipes, n, HALF: tl.constexpr, C: tl.constexpr):
    """Return a group's part of the nth tile of dSᵀ as an operand, with its columns in the order of the queries."""
    ROWS: tl.constexpr = C.BLOCK_N // 2
    x = pipes.ds.tiles.index(n % C.STAGES).reshape([C.BLOCK_N, 64]).slice(HALF * ROWS, ROWS)
    x = x.load(stored_layout(64)).reshape([64, 2, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, 64])
    return gl.convert_layout(x, operand_layout(C.BLOCK_D))
