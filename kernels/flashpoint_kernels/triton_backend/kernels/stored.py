"""Store dS once, and compute dQ as a product over it, in place of a second computation of S and dP.

`attention_backward_kv` computes tiles of dSᵀ for dK and dV. With STORE_DS it also stores dS, in 16 bits.
`attention_backward_q_stored` then computes

    dQ = scale·dS K    one program per block of queries of one head

The memory of a query head has a row for each query, whose length is a multiple of 128 keys. hopper/stored.py has other
places in the same memory. host/stored.py chooses the sequences whose dS is stored.
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col
from flashpoint_kernels.triton_backend.kernels.backward import ITEM
from flashpoint_kernels.triton_backend.kernels.interpret import cast, dot
from flashpoint_kernels.triton_backend.kernels.scores import visible
from flashpoint_kernels.triton_backend.kernels.tiles import (
    block_at,
    heads_column,
    key_stretches,
    load,
    load_sequence,
    places_of_ds,
    rows_of,
    store,
    stored_of,
)


@triton.jit
def add_stored(dq, k_rows, stored, block, band, lo, hi, FULL: tl.constexpr, C: tl.constexpr):
    """Return dq (M, D) of a Block plus the contribution of keys [lo, hi), a tile at a time.

    FULL, lo and hi are as in `attend_keys`. Without FULL a tile has places of keys that its queries do not see, where
    nothing may be stored. No row of dq reads another query's dS, so places of queries beyond the last do no harm.
    """
    within = tl.arange(0, C.BLOCK_N)
    for j0 in range(lo, hi, C.BLOCK_N):
        b_k = load(k_rows, j0 + within, C.BLOCK_D, FULL, C.EVEN)  # (N, D)
        b_ds = tl.load(places_of_ds(stored, block.first, j0, C))  # (M, N)
        if not FULL:
            b_ds = tl.where(visible(block.queries[:, None], j0, within[None, :], band, C), b_ds, 0.0)
        dq = dot(b_ds, b_k, dq, C.TF32)
    return dq


@triton.jit(do_not_specialize=["heads", "head_dim"])
def attention_backward_q_stored(table, floats, items, heads, head_dim, C: tl.constexpr):
    """Store dq of a block of queries of one head from its stored dS. Grid: items × `heads`."""
    item = items + (tl.program_id(0) // heads) * ITEM
    head = tl.program_id(0) % heads
    row = tl.load(item).to(tl.int64)
    t = table + row * col.WIDTH
    if head >= tl.load(t + col.HEADS):
        return
    block = block_at(tl.load(item + 1), head, tl.load(t + col.GROUP).to(tl.int32), C)
    seq = load_sequence(t, floats + row * col.SCALARS, heads_column(block, C))
    band = seq.band
    k_rows = rows_of(t, col.K, block.kv_head, band.kv_len, head_dim, C)
    stored = stored_of(t, head, C)
    _lo, full_lo, full_hi, hi = key_stretches(block.first, block.last, band, 0, band.kv_len, C)
    dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
    dq = add_stored(dq, k_rows, stored, block, band, full_lo, full_hi, True, C)
    dq = add_stored(dq, k_rows, stored, block, band, full_hi, hi, False, C)
    dq = tl.where(block.queries[:, None] < band.q_len, dq * seq.scale, 0.0)
    dq_rows = rows_of(t, col.DQ, head, tl.load(t + col.Q_ROWS), head_dim, C)
    store(dq_rows, block.queries, cast(dq, C.DTYPE), C.BLOCK_D, C.EVEN)
