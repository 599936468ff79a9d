"""What makes the bits of a CPU answer depend on its own sequence alone: its thread count and the place of its memory.

BLAS splits its sums by the number of threads and picks its path by alignment, so the same rows could come out
different beside other rows, or at an odd address. `torch` and `tiled` run a sequence at a time inside `threads`, on
`aligned` tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flashpoint_kernels.spec import Row, Spec

# Measured on 2 CPU cores, 8 heads, D 64, a call a millisecond, threads asleep while they wait, as in the server: a
# second thread costs a third at 18 MiFLOP, a fifth at 32 and 50, and saves a tenth at 72, two fifths at 128.
FLOPS_PER_THREAD = 1 << 25

_ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register, and what torch's allocator gives


def thread_count(spec: Spec, row: Row) -> int:
    """Threads for one sequence: one for each FLOPS_PER_THREAD of 2·Hq·sq·sk·(D + Dv), at most the machine's cores."""
    flops = 2 * spec.q_heads * row.q_len * row.kv_len * (spec.head_dim + spec.value_dim)
    return max(1, min(flops // FLOPS_PER_THREAD, os.cpu_count() or 1))


@contextmanager
def threads(spec: Spec, row: Row) -> Iterator[None]:
    """Run torch's CPU operations with `thread_count` threads; the count before is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count(spec, row))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def aligned(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in `dtype`, contiguous and at an aligned address: itself where it is all that already, else a copy."""
    t = t.to(dtype).contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)
