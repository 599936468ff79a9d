"""The kernels for Hopper (sm_90): tiles by the copy engine (TMA), warps with roles. Level 0, 16-bit, aligned rows only.

They are written in Gluon, the language of Triton's lower level, because Triton's own cannot give warps roles. One warp
is the producer: it loads tiles into shared memory. Two groups of four warps are consumers: each multiplies half of a
block, so that the softmax of one runs beside the products of the other (FlashAttention-3, Shah et al. 2024, §3.1 and
§3.2).

Gluon's names are not stable yet, so launch.py imports this when the path is asked for, not before.
"""
