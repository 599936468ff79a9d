"""The kernels for Hopper (sm_90): the copy engine (TMA) loads tiles, and warps are specialized.

They support level 0 (see `Spec.level`), 16-bit dtypes and aligned rows. They are written in Gluon, Triton's lower-level
language, because Triton's own language cannot give warps different roles. One warp is the producer: it loads tiles into
shared memory. Two groups of four warps are consumers: each multiplies half of a block, so the softmax of one group runs
during the products of the other (FlashAttention-3, Shah et al. 2024, §3.1 and §3.2).

Gluon's names are not stable yet, so launch.py imports this package only when a problem uses these kernels.
"""
