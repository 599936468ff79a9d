"""The forward kernel for Hopper: tiles by the copy engine (TMA), warps with roles. Level 0, 16-bit, aligned rows alone.

One warp group loads; two more each multiply half of the block of queries, so that the softmax of one runs beside
the products of the other (FlashAttention-3, Shah et al. 2024, §3.1). Triton makes the roles of one plain loop,
where it can: triton 3.7.1 wants four warps, no branch before, within or after the loop, and no tile loaded through
pointers before it. Hence no early return, no split over keys, and a visibility test in every tile. Notation as in
forward.py.
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend import table as c
from flashpoint_kernels.triton_backend.forward import ITEM, online_softmax, store_answer
from flashpoint_kernels.triton_backend.interpret import cast, dot
from flashpoint_kernels.triton_backend.scores import LOG2E, visible
from flashpoint_kernels.triton_backend.tiles import describe, key_stretches, load_sequence, locate


@triton.jit(do_not_specialize=["heads", "head_dim", "value_dim"])
def attention_forward_hopper(
    table, floats, items, heads, head_dim, value_dim,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """o and lse of one work item and head, as `attention_forward` gives them; no part of a split problem."""
    item = items + (tl.program_id(0) // heads) * ITEM
    head = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * c.WIDTH
    seq = load_sequence(t, floats + row * c.SCALARS, head)
    q_len, kv_len = seq[4][0], seq[4][1]
    group = tl.load(t + c.GROUP).to(tl.int32)
    # A program whose sequence has no such head takes a block beyond the last query: it sees nothing and stores nothing.
    i0 = tl.where(head < tl.load(t + c.HEADS), tl.load(item + 1), tl.load(t + c.Q_ROWS).to(tl.int32))

    q_base, q_head, q_stride = locate(t, c.Q, DTYPE, True)
    k_base, k_head, k_stride = locate(t, c.K, DTYPE, True)
    v_base, v_head, v_stride = locate(t, c.V, DTYPE, True)
    q_rows = describe(q_base + head * q_head, q_len, head_dim, q_stride, BLOCK_M, BLOCK_D)
    k_rows = describe(k_base + head // group * k_head, kv_len, head_dim, k_stride, BLOCK_N, BLOCK_D)
    v_rows = describe(v_base + head // group * v_head, kv_len, value_dim, v_stride, BLOCK_N, BLOCK_DV)
    o_m = i0 + tl.arange(0, BLOCK_M)
    within = tl.arange(0, BLOCK_N)
    q = q_rows.load([i0, 0])  # (M, D)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denom = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    unit = seq[3] * LOG2E
    lo, _full_lo, _full_hi, hi = key_stretches(i0, seq[4], 0, kv_len, 0, BLOCK_M, BLOCK_N)
    for j0 in tl.range(lo, hi, BLOCK_N, warp_specialize=True):
        k = k_rows.load([j0, 0])  # (N, D)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), "ieee")  # (M, N)
        s = tl.where(visible(o_m[:, None], j0, within[None, :], seq[4], 0), s, float("-inf"))
        p, m, denom, acc = online_softmax(s, unit, m, denom, acc)
        v = v_rows.load([j0, 0])  # (N, Dv)
        acc = dot(cast(p, DTYPE), v, acc, "ieee")

    denom = tl.where(denom == 0.0, 1.0, denom)  # no key: m is −inf, so o = 0 and lse = −inf
    o = acc / denom[:, None]
    store_answer(o, m + tl.log2(denom), t, head, o_m, q_len, value_dim, DTYPE, True, BLOCK_DV, EVEN)
