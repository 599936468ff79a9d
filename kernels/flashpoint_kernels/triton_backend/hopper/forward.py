"""The forward kernel for Hopper. The notation is that of ../kernels/forward.py.

A group of warps issues the product for the scores of a tile before the product with the values of the previous tile.
So the softmax of a tile runs while a product of its own group runs. The two groups issue products in turns
(FlashAttention-3's ping-pong), so the softmax of one also runs during the products of the other, tile by tile. A group
computes its tiles from the last to the first: tiles that need a visibility test come first.
"""

from typing import Any, NamedTuple

import triton.language as tl

from flashpoint_kernels.triton_backend.hopper.gluon import gl, hopper, jit, mbarrier, wgmma, wgmma_wait
from flashpoint_kernels.triton_backend.hopper.pipeline import (
    Launched,
    Pipe,
    QueryWork,
    barriers,
    carried,
    descriptor,
    find_queries,
    first_key,
    load_keys,
    load_tile,
    operand,
    operand_layout,
    product_layout,
    release,
    stages,
    store_rows,
    wait_full,
)
from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.forward import ITEM, online_softmax
from flashpoint_kernels.triton_backend.kernels.groups import Sequence, Softmax
from flashpoint_kernels.triton_backend.kernels.scores import LN2, LOG2E, visible
from flashpoint_kernels.triton_backend.kernels.tiles import locate_vector, rows_of


class Pipes(NamedTuple):
    q: Pipe  # one stage: tile n holds the queries of the nth block that sees keys
    k: Pipe
    v: Pipe
    turns: Any  # one barrier per group: a phase ends when the other group has issued its products of a tile


class Group(NamedTuple):
    """A group of warps that multiplies half of a block: half 0 or 1.

    Its queries have the indices o_m (M / 2,), from i0 on, and are in q in shared memory.
    """

    half: Any
    i0: Any
    o_m: Any
    q: Any
    pipes: Pipes
    work: QueryWork
    seq: Sequence


class Running(NamedTuple):
    """The state of a block between two tiles: P of the last tile, and the Softmax of all scores so far.

    `p` has the form that `carried` returns. The product of P and the last tile's values is not yet in acc.
    """

    p: Any
    softmax: Softmax


@jit(do_not_specialize=["heads", "head_dim", "value_dim", "blocks"])
def attention_forward_hopper(table, floats, items, heads, head_dim, value_dim, blocks, C: tl.constexpr):
    """Store o and lse of each work item and head, as `attention_forward` does, but keys are never split into parts.

    `blocks` is the number of items times heads. The programs share them; with `blocks` programs, each takes one block.
    """
    launched = Launched(
        table=table, floats=floats, items=items, heads=heads, head_dim=head_dim, value_dim=value_dim
    )  # fmt: skip
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
            (consumer, (pipes, launched, blocks, 0, C)),
            (consumer, (pipes, launched, blocks, 1, C)),
            (producer, (pipes, launched, blocks, C)),
        ],
        [4, 1],
        [240, 24],
    )


@jit
def rounds(blocks):
    """Return the number of blocks that this program computes."""
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
def producer(pipes, launched, blocks, C: tl.constexpr):
    """Run the loading warp: for each block load the queries, then keys and values tile by tile."""
    tiles, before, seeing = 0, 0, 0  # `before` is the first tile of the previous block that sees keys
    for nth in range(rounds(blocks)):
        seq, work = find_queries(launched, block_of(nth), tiles, ITEM, C)
        if work.end > tiles:
            if C.TWO_SETS:
                # Each of the two calls is compiled on its own, with memory for descriptors of its own.
                if seeing % 2 == 0:
                    load_block(pipes, launched, seq, work, before, seeing, C)
                else:
                    load_block(pipes, launched, seq, work, before, seeing, C)
            else:
                load_block(pipes, launched, seq, work, tiles, seeing, C)
            before = tiles
            tiles = work.end
            seeing += 1


@jit
def load_block(pipes, launched, seq, work, ended, seeing, C: tl.constexpr):
    """Load the queries, keys and values of a block.

    Descriptors must not change during a copy, so first wait for the copies of the block that used the same descriptors:
    the previous one, or with TWO_SETS the one before it. `ended` is the number of tiles up to the end of that block.
    """
    t, head, band = seq.row, seq.head, seq.band
    # Where a later tile is already in the stage of an earlier one, the earlier copy has ended.
    for n in range(gl.maximum(work.first - C.STAGES, 0), ended):
        wait_full(pipes.k, n, C)
        wait_full(pipes.v, n, C)
    if not C.TWO_SETS:  # else the previous block has waited for it: its queries used the same stage
        mbarrier.wait(pipes.q.full.index(0), (seeing - 1) & 1, pred=seeing > 0)
    kv_head = head // gl.load(t + col.GROUP).to(gl.int32)
    q = descriptor(rows_of(t, col.Q, head, band.q_len, launched.head_dim, C), C.BLOCK_M, C.BLOCK_D, C)
    k = descriptor(rows_of(t, col.K, kv_head, band.kv_len, launched.head_dim, C), C.BLOCK_N, C.BLOCK_D, C)
    v = descriptor(rows_of(t, col.V, kv_head, band.kv_len, launched.value_dim, C), C.BLOCK_N, C.BLOCK_DV, C)
    mbarrier.wait(pipes.q.empty.index(0), (seeing & 1) ^ 1)
    load_tile(q, pipes.q.tiles.index(0), [work.i0, 0], pipes.q.full.index(0))
    load_keys(k, pipes.k, v, pipes.v, work, C)


@jit
def consumer(pipes, launched, blocks, HALF: tl.constexpr, C: tl.constexpr):
    """Run a group of warps that multiplies: compute o and lse of half of each block's queries."""
    ROWS: tl.constexpr = C.BLOCK_M // 2
    S: tl.constexpr = product_layout(C.BLOCK_N)
    q = pipes.q.tiles.index(0).slice(HALF * ROWS, ROWS)
    tiles, seeing = 0, 0
    for nth in range(rounds(blocks)):
        seq, work = find_queries(launched, block_of(nth), tiles, ITEM, C)
        i0 = work.i0 + HALF * ROWS
        o_m = i0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        group = Group(half=HALF, i0=i0, o_m=o_m, q=q, pipes=pipes, work=work, seq=seq)
        attend(group, seeing, launched.value_dim, C)
        seeing += (work.end > tiles).to(gl.int32)
        tiles = work.end


@jit
def attend(group, seeing, value_dim, C: tl.constexpr):
    """Store o and lse of half of a block's queries.

    `seeing` is the number of earlier blocks of this program that see keys.
    """
    ROWS: tl.constexpr = C.BLOCK_M // 2
    S: tl.constexpr = product_layout(C.BLOCK_N)
    O: tl.constexpr = product_layout(C.BLOCK_DV)  # noqa: E741
    pipes, work = group.pipes, group.work
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    denom = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    softmax = Softmax(m=m, denom=denom, acc=gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, O))
    first, last = work.first, work.end - 1
    if work.end > first:
        mbarrier.wait(pipes.q.full.index(0), seeing & 1)
        wait_full(pipes.k, first, C)
        s = wgmma_wait(0, [issue_scores(group, first, C)])
        p, m, denom, _shrink = tile_softmax(s, softmax, group, first, True, C)
        p = carried(p, operand_layout(C.BLOCK_DV), C)
        running = Running(p=p, softmax=Softmax(m=m, denom=denom, acc=softmax.acc))
        for n in range(first + 1, work.cut):
            running = step(running, group, n, seeing, True, C)
        for n in range(gl.maximum(work.cut, first + 1), work.end):
            running = step(running, group, n, seeing, False, C)
        mbarrier.arrive(pipes.q.empty.index(0), count=1)
        wait_full(pipes.v, last, C)
        b_p = operand(running.p, operand_layout(C.BLOCK_DV), C)
        values = wgmma(b_p, pipes.v.tiles.index(last % C.STAGES), running.softmax.acc, is_async=True)
        acc, _b_p = wgmma_wait(0, [values, b_p])
        release(pipes.v, last, C)
        softmax = Softmax(m=running.softmax.m, denom=running.softmax.denom, acc=acc)
    store_answer(softmax, group, value_dim, C)


@jit
def store_answer(softmax, group, value_dim, C: tl.constexpr):
    """Store o and lse of half of a block's queries, as ../kernels/forward.py's `store_answer` does."""
    O: tl.constexpr = product_layout(C.BLOCK_DV)  # noqa: E741
    seq, o_m = group.seq, group.o_m
    t, head, q_len = seq.row, seq.head, seq.band.q_len
    denom = gl.where(softmax.denom == 0.0, 1.0, softmax.denom)  # without a key, m is −inf, so o = 0 and lse = −inf
    q_rows = gl.load(t + col.Q_ROWS)
    lse = gl.where(o_m < q_len, (softmax.m + gl.log2(denom)) * LN2, float("-inf"))
    p_lse, lse_head = locate_vector(t, col.LSE)
    wanted_rows = gl.where(gl.load(t + col.LSE) != 0, q_rows, 0)
    gl.store(p_lse + head * lse_head + o_m, lse, mask=o_m < wanted_rows)
    o = softmax.acc / gl.convert_layout(denom, gl.SliceLayout(1, O))[:, None]
    store_rows(o, rows_of(t, col.O, head, q_rows, value_dim, C), group.i0, q_len, C)


@jit
def step(running, group, n, seeing, CUT: tl.constexpr, C: tl.constexpr):
    """Compute the scores of tile n beside the product with the values of tile n − 1; return Running for the next tile.

    The keys of tile n have arrived. CUT: the tile needs a visibility test. The two groups take turns for all tiles but
    the first of each block. `seeing` is the number of earlier blocks that see keys.
    """
    P: tl.constexpr = operand_layout(C.BLOCK_DV)
    pipes, before = group.pipes, n - 1
    b_p = operand(running.p, P, C)
    mbarrier.wait(pipes.turns.index(group.half), turn(before - seeing, group.half))
    scores = issue_scores(group, n, C)
    wait_full(pipes.v, before, C)
    values = wgmma(b_p, pipes.v.tiles.index(before % C.STAGES), running.softmax.acc, is_async=True)
    mbarrier.arrive(pipes.turns.index(1 - group.half), count=1)
    s = wgmma_wait(1, [scores])  # wait for the first of the two products
    p, m, denom, shrink = tile_softmax(s, running.softmax, group, n, CUT, C)
    acc, _b_p = wgmma_wait(0, [values, b_p])
    release(pipes.v, before, C)
    p = carried(p, P, C)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, product_layout(C.BLOCK_DV)))[:, None]
    return Running(p=p, softmax=Softmax(m=m, denom=denom, acc=acc))


@jit
def turn(n, half):
    """Return the phase of the barrier `Pipes.turns` whose end a group awaits before its nth turn.

    The first group does not wait for its first turn.
    """
    return (n & 1) ^ (1 - half)


@jit
def issue_scores(group, n, C: tl.constexpr):
    """Return the product of a group's queries with tile n of the keys, (M / 2, N); it may still be running."""
    ROWS: tl.constexpr = C.BLOCK_M // 2
    zeros = gl.full([ROWS, C.BLOCK_N], 0.0, gl.float32, product_layout(C.BLOCK_N))
    b_k = group.pipes.k.tiles.index(n % C.STAGES)
    return wgmma(group.q, b_k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def tile_softmax(s, softmax, group, n, CUT: tl.constexpr, C: tl.constexpr):
    """Return (p, m, denom, shrink) of `online_softmax` for the scores of tile n, and release the tile's keys.

    The last step is the wait for the keys of the next tile. ptxas moves no code across this wait, which is a loop.
    Otherwise it would move the wait for the product with the values to the start of the softmax, and no product of this
    group would run during the softmax.
    """
    k, work, seq = group.pipes.k, group.work, group.seq
    release(k, n, C)
    if CUT:
        within = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, product_layout(C.BLOCK_N)))
        j0 = first_key(n, work, C)
        s = gl.where(visible(group.o_m[:, None], j0, within[None, :], seq.band, C), s, float("-inf"))
    p, m, denom, shrink = online_softmax(s, seq.scale * LOG2E, softmax.m, softmax.denom)
    wait_full(k, n + 1, C, pred=n + 1 < work.end)
    return p, m, denom, shrink
