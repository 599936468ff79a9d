"""Store dS once for Hopper, and compute dQ as a product over it, in place of a second computation of S and dP.

The kernels for dK and dV compute tiles of dSᵀ. With STORE_DS they also store them, in 16 bits, from the registers that
hold them: 16 bytes a thread, without shared memory. `attention_backward_q_stored_hopper` then computes

    dQ = scale·dS K    one program per block of queries of one head

A stored tile has 128 keys and QUERIES queries, and is contiguous. The memory of a query head has all tiles of its
first 64 queries, from the first keys to the last, then those of the next 64. In a tile, each row (one key) has its
queries in the order of `pipeline.stored_order`. ../kernels/stored.py has the general kernel for dQ. host/stored.py
chooses the sequences whose dS is stored.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashpoint_kernels.triton_backend.hopper.gluon import gl, hopper, jit, mbarrier, tma, tma_load, wgmma, wgmma_wait
from flashpoint_kernels.triton_backend.hopper.pipeline import (
    Launched,
    Pipe,
    barriers,
    descriptor,
    find_queries,
    product_layout,
    release,
    stages,
    store_rows,
    stored_layout,
    stored_order,
    wait_empty,
    wait_full,
)
from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.backward import ITEM
from flashpoint_kernels.triton_backend.kernels.bounds import key_range
from flashpoint_kernels.triton_backend.kernels.tiles import QUERIES, rows_of, stored_of


@jit
def store_ds(x, stored, j0, nth, i0, C: tl.constexpr):
    """Store x, a group's half of a tile of dSᵀ: 64 keys from j0 on, M queries from i0 on, in `product_layout`.

    `nth` counts the query heads from that of `stored` on.
    """
    COLUMNS: tl.constexpr = C.BLOCK_M
    L: tl.constexpr = stored_layout(COLUMNS)
    o_n, o_m = gl.arange(0, 64, gl.SliceLayout(1, L)), gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
    p_tile = stored.base + nth * stored.head + (i0 // QUERIES) * stored.row + j0.to(gl.int64) * QUERIES + i0 % QUERIES
    places = tl.multiple_of(p_tile, 16) + (o_n[:, None] * QUERIES + o_m[None, :])
    gl.store(places, stored_order(x, COLUMNS))


class StoredPipes(NamedTuple):
    """The pipes of the kernel that computes dQ from the stored dS.

    A stage has a tile of keys in `k`, and the BLOCK_M / 64 stored tiles of these keys in `ds`, whose barriers are for
    both.
    """

    ds: Pipe
    k: Any


@jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_backward_q_stored_hopper(table, floats, items, heads, head_dim, value_dim, C: tl.constexpr):
    """Store dq of a block of queries of one head from its stored dS, from the first tile of keys to the last."""
    launched = Launched(
        table=table, floats=floats, items=items, heads=heads, head_dim=head_dim, value_dim=value_dim
    )  # fmt: skip
    seq, work = find_queries(launched, gl.program_id(0), 0, ITEM, C)
    PARTS: tl.constexpr = C.BLOCK_M // 64
    ds = stages(C.STAGES * PARTS, C.BLOCK_N, 64, C)
    k = stages(C.STAGES, C.BLOCK_N, C.BLOCK_D, C)
    full, empty = barriers(C.STAGES, 1), barriers(C.STAGES, 2)
    pipes = StoredPipes(ds=Pipe(tiles=ds, full=full, empty=empty), k=k)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (stored_consumer, (pipes, work, seq, head_dim, 0, C)),
            (stored_consumer, (pipes, work, seq, head_dim, 1, C)),
            (stored_producer, (pipes, work, seq, head_dim, C)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def stored_producer(pipes, work, seq, head_dim, C: tl.constexpr):
    """Run the loading warp: for each tile of keys load the keys, and the dS of the block's queries and these keys."""
    PARTS: tl.constexpr = C.BLOCK_M // 64
    LAYOUT: tl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK_N, 64], C.DTYPE)
    t, head, band = seq.row, seq.head, seq.band
    if work.end > 0:
        kv_head = head // gl.load(t + col.GROUP).to(gl.int32)
        k = descriptor(rows_of(t, col.K, kv_head, band.kv_len, head_dim, C), C.BLOCK_N, C.BLOCK_D, C)
        stored = stored_of(t, head, C)
        keys = (stored.row // QUERIES).to(gl.int32)  # the keys of whole tiles
        base = tl.multiple_of(stored.base + work.i0 // QUERIES * stored.row, 16)
        ds = tma.make_tensor_descriptor(base, [PARTS * keys, 64], [64, 1], [C.BLOCK_N, 64], LAYOUT)
        for n in range(work.end):
            at = n % C.STAGES
            full = pipes.ds.full.index(at)
            wait_empty(pipes.ds, n, C)
            mbarrier.expect(full, PARTS * ds.block_type.nbytes + k.block_type.nbytes)
            tma_load(k, [n * C.BLOCK_N, 0], full, pipes.k.index(at))
            for part in gl.static_range(PARTS):
                tma_load(ds, [part * keys + n * C.BLOCK_N, 0], full, pipes.ds.tiles.index(at * PARTS + part))


@jit
def stored_consumer(pipes, work, seq, head_dim, HALF: tl.constexpr, C: tl.constexpr):
    """Run a group of warps that multiplies: compute dq of half of the block's queries.

    These are one or two parts of 64 queries. A part uses only the tiles of keys that its queries see: no kernel stored
    the others.
    """
    PARTS: tl.constexpr = C.BLOCK_M // 64
    MINE: tl.constexpr = PARTS // 2
    FIRST: tl.constexpr = HALF * MINE
    P: tl.constexpr = product_layout(C.BLOCK_D)
    i0 = work.i0 + HALF * (C.BLOCK_M // 2)
    dq0 = gl.full([64, C.BLOCK_D], 0.0, gl.float32, P)
    end = tiles_seen(i0, seq, C)
    q_rows = rows_of(seq.row, col.DQ, seq.head, gl.load(seq.row + col.Q_ROWS), head_dim, C)
    if MINE == 2:
        both = end
        end = gl.maximum(tiles_seen(i0 + 64, seq, C), both)  # later queries see as many keys, or are beyond the last
        dq1 = gl.full([64, C.BLOCK_D], 0.0, gl.float32, P)
        for n in range(both):
            at = n % C.STAGES
            wait_full(pipes.ds, n, C)
            ds0, ds1 = pipes.ds.tiles.index(at * PARTS + FIRST), pipes.ds.tiles.index(at * PARTS + FIRST + 1)
            dq0 = wgmma(ds0.permute((1, 0)), pipes.k.index(at), dq0, is_async=True)
            dq1 = wgmma(ds1.permute((1, 0)), pipes.k.index(at), dq1, is_async=True)
            dq0, dq1 = wgmma_wait(0, [dq0, dq1])
            release(pipes.ds, n, C)
        for n in range(both, end):
            at = n % C.STAGES
            wait_full(pipes.ds, n, C)
            ds = pipes.ds.tiles.index(at * PARTS + FIRST + 1)
            dq1 = wgmma_wait(0, [wgmma(ds.permute((1, 0)), pipes.k.index(at), dq1, is_async=True)])
            release(pipes.ds, n, C)
        store_rows(dq1 * seq.scale, q_rows, i0 + 64, seq.band.q_len, C, True)
    else:
        for n in range(end):
            at = n % C.STAGES
            wait_full(pipes.ds, n, C)
            ds = pipes.ds.tiles.index(at * PARTS + FIRST)
            dq0 = wgmma_wait(0, [wgmma(ds.permute((1, 0)), pipes.k.index(at), dq0, is_async=True)])
            release(pipes.ds, n, C)
    for n in range(end, work.end):  # tiles that only the other group's queries see
        wait_full(pipes.ds, n, C)
        release(pipes.ds, n, C)
    store_rows(dq0 * seq.scale, q_rows, i0, seq.band.q_len, C, True)


@jit
def tiles_seen(i0, seq, C: tl.constexpr):
    """Return the number of tiles of keys that the 64 queries from i0 on see, from the first key on."""
    band = seq.band
    last = gl.minimum(i0 + 63, band.q_len - 1)
    _lo, hi = key_range(i0, last, band.offset, band.left, band.right, band.kv_len)
    return gl.where(i0 < band.q_len, (gl.maximum(hi, 0) + C.BLOCK_N - 1) // C.BLOCK_N, 0)
