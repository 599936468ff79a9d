"""Compile the functions of `flashpoint_kernels.problems.bounds` for calls from kernels."""

import triton
import triton.language as tl

from flashpoint_kernels.problems import bounds

vars(bounds)["tl"] = tl  # Triton's interpreter needs `tl` to be visible from every compiled function

key_range = triton.jit(bounds.key_range)
full_key_range = triton.jit(bounds.full_key_range)
query_range = triton.jit(bounds.query_range)
full_query_range = triton.jit(bounds.full_query_range)
