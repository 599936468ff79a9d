"""The forward kernel for Hopper. Notation as in ../forward.py.

A group of warps issues the product for the scores of a tile before the product with the values of the tile before it.
So the softmax of a tile also runs beside a product of its own group. The two groups issue products in turns
(FlashAttention-3's ping-pong), so the softmax of one runs beside the products of the other, tile by tile. A group
computes its tiles from the last to the first: tiles that need a visibility test come first.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashpoint_kernels.triton_backend import table as col
from flashpoint_kernels.triton_backend.forward import ITEM, online_softmax
from flashpoint_kernels.triton_backend.hopper.gluon import gl, hopper, jit, mbarrier, wgmma, wgmma_wait
from flashpoint_kernels.triton_backend.hopper.pipeline import (
    Pipe,
    barriers,
    carried,
    descriptor,
    find_queries,
    first_key,
    load_keys,
    load_tile,
    operand,
    release,
    stages,
    store_rows,
    wait_full,
)
from flashpoint_kernels.triton_backend.scores import LN2, LOG2E, visible
from flashpoint_kernels.triton_backend.tiles import locate_vector, rows_of


class Pipes(NamedTuple):
    q: Pipe  # one stage: tile n holds the queries of the nth block that sees keys
    k: Pipe
    v: Pipe
    turns: Any  # one barrier per group: a phase ends when the other group has issued its products of a tile


class Launched(NamedTuple):
    """The arguments of a launch: see `attention_forward_hopper`."""

    table: Any
    floats: Any
    items: Any
    heads: Any
    head_dim: Any
    value_dim: Any
    blocks: Any


@jit(do_not_specialize=["heads", "head_dim", "value_dim", "blocks"])
def attention_forward_hopper(table, floats, items, heads, head_dim, value_dim, blocks, C: tl.constexpr):
    """Store o and lse of each work item and head, as `attention_forward` does, but never a part of a split problem.

    `blocks` is the number of items times heads. They are divided among the programs; with as many programs, each takes
    one.
    """
    launched = Launched(
        table=table, floats=floats, items=items, heads=heads, head_dim=head_dim, value_dim=value_dim, blocks=blocks
    )
    q = stages(1, C.BLOCK_M, C.BLOCK_D, C)
    k, v = stages(C.STAGES, C.BLOCK_N, C.BLOCK_D, C), stages(C.STAGES, C.BLOCK_N, C.BLOCK_DV, C)
    q_full, k_full, v_full = barriers(1, 1), barriers(C.STAGES, 1), barriers(C.STAGES, 1)
    q_empty, k_empty, v_empty = barriers(1, 2), barriers(C.STAGES, 2), barriers(C.STAGES, 2)
    pipes = Pipes(
        q=Pipe(tiles=q, full=q_full, empty=q_empty),
        k=Pipe(tiles=k, full=k_full, empty=k_empty),
        v=Pipe(tiles=v, full=v_full, empty=v_empty),
        turns=barriers(2, 1),
    )
    hopper.fence_async_shared()  # make the barriers visible to the copy engine
    gl.warp_specialize(
        [
            (consumer, (pipes, launched, 0, C)),
            (consumer, (pipes, launched, 1, C)),
            (producer, (pipes, launched, C)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def rounds(blocks):
    """Return the number of blocks that this program takes."""
    whole = blocks // gl.num_programs(0)
    return whole + (block_of(whole) < blocks).to(gl.int32)


@jit
def block_of(nth):
    """Return the index of the nth block that this program takes.

    The heaviest blocks come first. The order of the programs alternates: the program that took the lightest block of a
    round takes the heaviest of the next.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    return nth * programs + gl.where(nth % 2 == 0, program, programs - 1 - program)


@jit
def producer(pipes, launched, C: tl.constexpr):
    """Run the loading warp: for each block load the queries, then keys and values tile by tile."""
    tiles, seeing = 0, 0
    for nth in range(rounds(launched.blocks)):
        seq, work = find_queries(
            launched.table, launched.floats, launched.items, launched.heads, block_of(nth), tiles, ITEM, C
        )
        t, head, band = seq.row, seq.head, seq.band
        if work.end > tiles:
            # Wait for the copies of the block before: its descriptors must not change during a copy.
            for n in range(gl.maximum(tiles - C.STAGES, 0), tiles):
                wait_full(pipes.k, n, C)
                wait_full(pipes.v, n, C)
            mbarrier.wait(pipes.q.full.index(0), (seeing - 1) & 1, pred=seeing > 0)
            kv_head = head // gl.load(t + col.GROUP).to(gl.int32)
            q = descriptor(rows_of(t, col.Q, head, band.q_len, launched.head_dim, C), C.BLOCK_M, C.BLOCK_D, C)
            k = descriptor(rows_of(t, col.K, kv_head, band.kv_len, launched.head_dim, C), C.BLOCK_N, C.BLOCK_D, C)
            v = descriptor(rows_of(t, col.V, kv_head, band.kv_len, launched.value_dim, C), C.BLOCK_N, C.BLOCK_DV, C)
            mbarrier.wait(pipes.q.empty.index(0), (seeing & 1) ^ 1)
            load_tile(q, pipes.q.tiles.index(0), [work.i0, 0], pipes.q.full.index(0))
            load_keys(k, pipes.k, v, pipes.v, work, C)
            tiles = work.end
            seeing += 1


@jit
def consumer(pipes, launched, HALF: tl.constexpr, C: tl.constexpr):
    """Run a group of warps that multiplies: compute o and lse of half of each block's queries."""
    tiles, seeing = 0, 0
    for nth in range(rounds(launched.blocks)):
        seq, work = find_queries(
            launched.table, launched.floats, launched.items, launched.heads, block_of(nth), tiles, ITEM, C
        )
        attend(pipes, work, seq, seeing, launched.value_dim, HALF, C)
        seeing += (work.end > tiles).to(gl.int32)
        tiles = work.end


@jit
def attend(pipes, work, seq, seeing, value_dim, HALF: tl.constexpr, C: tl.constexpr):
    """Store o and lse of half of a block's queries; `seeing` is the number of blocks before it that have seen keys."""
    S: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    O: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_DV, 16])  # noqa: E741
    P: tl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: tl.constexpr = C.BLOCK_M // 2
    t, head = seq.row, seq.head
    i0 = work.i0 + HALF * ROWS
    o_m = i0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    denom = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    acc = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, O)
    first, last = work.first, work.end - 1
    if work.end > first:
        mbarrier.wait(pipes.q.full.index(0), seeing & 1)
        wait_full(pipes.k, first, C)
        s = wgmma_wait(0, [issue_scores(pipes, first, HALF, S, C)])
        p, m, denom, _shrink = softmax(s, m, denom, o_m, pipes.k, work, seq, first, True, S, C)
        p = carried(p, P, C)
        for n in range(first + 1, work.cut):
            p, m, denom, acc = step(p, m, denom, acc, o_m, pipes, work, seq, n, seeing, True, HALF, S, O, P, C)
        for n in range(gl.maximum(work.cut, first + 1), work.end):
            p, m, denom, acc = step(p, m, denom, acc, o_m, pipes, work, seq, n, seeing, False, HALF, S, O, P, C)
        mbarrier.arrive(pipes.q.empty.index(0), count=1)
        wait_full(pipes.v, last, C)
        b_p = operand(p, P, C)
        acc, _b_p = wgmma_wait(0, [wgmma(b_p, pipes.v.tiles.index(last % C.STAGES), acc, is_async=True), b_p])
        release(pipes.v, last, C)

    denom = gl.where(denom == 0.0, 1.0, denom)  # no key: m is −inf, so o = 0 and lse = −inf
    q_len, q_rows = seq.band.q_len, gl.load(t + col.Q_ROWS)
    lse = gl.where(o_m < q_len, (m + gl.log2(denom)) * LN2, float("-inf"))
    p_lse, lse_head = locate_vector(t, col.LSE)
    wanted_rows = gl.where(gl.load(t + col.LSE) != 0, q_rows, 0)
    gl.store(p_lse + head * lse_head + o_m, lse, mask=o_m < wanted_rows)
    o = acc / gl.convert_layout(denom, gl.SliceLayout(1, O))[:, None]
    store_rows(o, rows_of(t, col.O, head, q_rows, value_dim, C), i0, q_len, C)


@jit
def step(
    p, m, denom, acc, o_m, pipes, work, seq, n, seeing,
    CUT: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr, O: tl.constexpr, P: tl.constexpr, C: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Compute the scores of tile n beside the product with the values of tile n − 1; return (p, m, denom, acc) for the
    next.

    `p` holds the probabilities of tile n − 1, as returned by `carried`. The keys of tile n have arrived. CUT: the tile
    needs a visibility test. All tiles take turns but the first of each block; `seeing` is the number of blocks before.
    """
    before = n - 1
    b_p = operand(p, P, C)
    mbarrier.wait(pipes.turns.index(HALF), ((before - seeing) & 1) ^ (1 - HALF))  # the first group has the first turn
    scores = issue_scores(pipes, n, HALF, S, C)
    wait_full(pipes.v, before, C)
    values = wgmma(b_p, pipes.v.tiles.index(before % C.STAGES), acc, is_async=True)
    mbarrier.arrive(pipes.turns.index(1 - HALF), count=1)
    s = wgmma_wait(1, [scores])  # the first of the two products
    p, m, denom, shrink = softmax(s, m, denom, o_m, pipes.k, work, seq, n, CUT, S, C)
    acc, _b_p = wgmma_wait(0, [values, b_p])
    release(pipes.v, before, C)
    p = carried(p, P, C)
    return p, m, denom, acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]


@jit
def issue_scores(pipes, n, HALF: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Return the product of a group's queries with tile n of the keys, (M / 2, N); it may still be running."""
    ROWS: tl.constexpr = C.BLOCK_M // 2
    zeros = gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, S)
    b_q = pipes.q.tiles.index(0).slice(HALF * ROWS, ROWS)
    return wgmma(b_q, pipes.k.tiles.index(n % C.STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def softmax(s, m, denom, o_m, k, work, seq, n, CUT: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Return (p, m, denom, shrink) of `online_softmax` for the scores of tile n, and release the tile's keys.

    It ends with the wait for the keys of the next tile. ptxas moves nothing across that wait loop. Without it, ptxas
    would move the wait for the values to the start of the softmax, and no product would run beside the softmax.
    """
    release(k, n, C)
    if CUT:
        within = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, S))
        j0 = first_key(n, work, C)
        s = gl.where(visible(o_m[:, None], j0, within[None, :], seq.band, C), s, float("-inf"))
    p, m, denom, shrink = online_softmax(s, seq.scale * LOG2E, m, denom)
    wait_full(k, n + 1, C, pred=n + 1 < work.end)
    return p, m, denom, shrink
