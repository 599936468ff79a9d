"""Compute the argument of the exponential from q·k, and its derivative, for tiles and transposed tiles.

The order is: s = scale·(q·k), apply the cap, add ALiBi and the float mask, hide keys. `i` and
`j` are query and key indices that broadcast to the tile: (BLOCK_M, 1) and (1, BLOCK_N) for S, or (1, BLOCK_M) and
(BLOCK_N, 1) for its transpose. A kernel contains no code for options above C.LEVEL; a neutral value at run time
disables other options.
"""

import triton
import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import columns as col

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.4028234663852886e38)  # the lowest float32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Return tanh with float32 rounding: Cephes' odd polynomial near 0, where 1 − 2/(e²ˣ + 1) would cancel."""
    x2 = x * x
    near = -5.70498872745e-3 * x2 + 2.06390887954e-2
    near = near * x2 - 5.37397155531e-2
    near = near * x2 + 1.33314422036e-1
    near = near * x2 - 3.33332819422e-1
    near = near * x2 * x + x
    size = tl.minimum(tl.abs(x), 20.0)  # from 10 on, tanh rounds to 1 in float32
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * 1.4426950408889634)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, tl.where(x == x, far, x)))


@triton.jit
def visible(i, j0, n, band, C: tl.constexpr):
    """Return whether query i may see key j0 + n, by the band and the number of keys. Level 0 has no left bound.

    Shift the bounds by j0 once per query and compare them with `n` directly: one instruction per score at level 0.
    """
    seen = n <= tl.minimum(i + (band.offset + band.right), band.kv_len - 1) - j0
    if C.LEVEL >= 1:
        seen = seen & (n >= i + (band.offset - band.left) - j0)
    return seen


@triton.jit
def visible_to(j, i0, m, band, C: tl.constexpr):
    """Return whether query i0 + m may see key j, by the band only; unlike `visible`, shift the bounds once per key."""
    seen = m >= j - (band.offset + band.right) - i0
    if C.LEVEL >= 1:
        seen = seen & (m <= j - (band.offset - band.left) - i0)
    return seen


@triton.jit
def modify(qk, i, j, seq, C: tl.constexpr):
    """Return (scores s·log2(e), the softcap's derivative at scale·qk) for a tile of products `qk`, float32.

    Scores that a boolean mask hides are −inf. The caller applies the band (see `visible`).
    """
    t, band = seq.row, seq.band
    slope = tl.full([1, 1], 1.0, tl.float32)
    if C.LEVEL == 0:
        s = qk * (seq.scale * LOG2E)
    else:
        s = qk * seq.scale
        cap = tl.load(seq.scalars + col.SOFTCAP)
        slope = tl.full(qk.shape, 1.0, tl.float32)
        if cap > 0.0:
            bent = tanh(s / cap)
            s = cap * bent
            slope = 1.0 - bent * bent
        if C.LEVEL == 2:
            slopes = tl.load(t + col.ALIBI).to(tl.pointer_type(tl.float32))
            if tl.load(t + col.ALIBI) != 0:
                s -= tl.load(slopes + seq.head) * tl.abs(i + band.offset - j).to(tl.float32)
            if C.MASK_DTYPE is not None:
                m_mask = (i < band.q_len) & (j < band.kv_len)
                head_stride, row_stride = tl.load(t + col.MASK + 1), tl.load(t + col.MASK + 2)
                place = seq.head * head_stride + i * row_stride + j * tl.load(t + col.MASK + 3)
                p_mask = tl.load(t + col.MASK).to(tl.pointer_type(C.MASK_DTYPE)) + place
                if C.MASK_DTYPE == tl.int8:
                    s = tl.where(tl.load(p_mask, mask=m_mask, other=0) != 0, s, float("-inf"))
                else:
                    s += tl.load(p_mask, mask=m_mask, other=0.0).to(tl.float32)
        # A mask may contain float32's lowest value, which is finite, and must not become −inf in base 2.
        s = tl.where(s == float("-inf"), s, tl.maximum(s * LOG2E, LEAST, propagate_nan=tl.PropagateNan.ALL))
    return s, slope


@triton.jit
def keep(queries, j0, seq, C: tl.constexpr):
    """Return which probabilities dropout keeps, bool (M, N), in the tile of `queries` (M,) at key j0.

    j0 is a multiple of 4.

    Philox4x32-10 (Salmon et al. 2011) with key = seed and counter = (j div 4, i, head, sequence). Key j takes word j
    mod 4, and is kept iff that word is not below ceil(p·2³²).
    """
    t = seq.row
    column = (j0 // 4 + tl.arange(0, C.BLOCK_N // 4)[None, :]).to(tl.uint32)
    zero = tl.full([C.BLOCK_M, C.BLOCK_N // 4], 0, tl.uint32)
    row = queries[:, None].to(tl.uint32)
    sequence = tl.load(t + col.INDEX).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(t + col.SEED), zero + column, zero + row, (zero + seq.head).to(tl.uint32), zero + sequence
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [C.BLOCK_M, C.BLOCK_N])
    return words.to(tl.int64) >= tl.load(t + col.DROP_BELOW)


@triton.jit
def probabilities(s, lse):
    """Return P = 2^(s − lse), limited to 1: forward and backward round scores differently, so P could exceed 1."""
    return tl.exp2(tl.minimum(s - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))
