"""What makes the bits of a CPU answer depend on its own sequence alone: its thread count and the place of its memory.

BLAS splits its sums by the number of threads and picks its path by alignment, so the same rows could come out
different beside other rows, or at an odd address. A request is cut by heads into parts that the cores run side by side
(`split`, `spread`), each part by one thread where there are enough of them. That is also the fastest way: on 2 cores at
(1,8,1024,64) parts of one thread each do 64 requests a second where OpenMP's two threads do 58.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from flashpoint_kernels.problem import Problem, shared_by_heads
from flashpoint_kernels.spec import Row
from flashpoint_kernels.support import whole_vectors

# Measured on 2 CPU cores, 8 heads, D 64, a call a millisecond, threads asleep while they wait, as in the server: a
# second thread costs a third at 18 MiFLOP, a fifth at 32 and 50, and saves a tenth at 72, two fifths at 128.
FLOPS_PER_THREAD = 1 << 25

# Some milliseconds: views and calls of torch cost a tenth of that. Parts of FLOPS_PER_THREAD made a gradient at
# (1,8,128,64) take 7.2 ms where one part takes 4.6 (2 cores, busy with other work).
FLOPS_PER_PART = 1 << 27


def _cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may run on: those that the system grants it, or its container's quota where less."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.exists() and not (text := quota.read_text()).startswith("max"):
        spent, period = map(int, text.split())
        granted = min(granted, spent // period)
    return max(1, granted)


CORES = _cores()
_ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register, and what torch's allocator gives


def split(problem: Problem) -> list[Problem]:
    """A problem of the CPU as parts that may run at the same time, in any order: one for each FLOPS_PER_PART of work.

    At most one for each key/value head; one, where heads cannot be told apart or it is a part already.
    """
    heads = problem.spec.kv_heads
    parts = min(problem.flops // FLOPS_PER_PART, heads)
    if parts < 2 or problem.cut_of or not can_be_cut(problem):
        return [problem]
    edges = [part * heads // parts for part in range(parts + 1)]
    return [problem.heads(start, stop) for start, stop in itertools.pairwise(edges)]


def can_be_cut(problem: Problem) -> bool:
    """Whether its heads can be told apart, and nothing is summed over them: see `Problem.heads`. A part was."""
    spec = problem.spec
    if problem.cut_of:
        return True
    if "dattn_mask" in spec.features and shared_by_heads(spec.tensors["attn_mask"].shape):
        return False
    return spec.ragged or spec.rank == 4


def spread(calls: Sequence[Callable[[], None]]) -> None:
    """Make the calls on all cores, and return when all have. Raises what one of them raised."""
    if len(calls) == 1:
        calls[0]()
        return
    for done in [_pool().submit(call) for call in calls]:
        done.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, "flashpoint-core")


def thread_count(problem: Problem, row: Row) -> int:
    """Threads for one sequence of `problem`: one for each FLOPS_PER_THREAD of 2·Hq·sq·sk·(D + Dv).

    At most the machine's cores, or what each key/value head of its request has of them where heads run side by side.
    """
    spec = problem.spec
    flops = 2 * spec.q_heads * row.q_len * row.kv_len * (spec.head_dim + spec.value_dim)
    if spec.options.causal and spec.q_len == spec.kv_len:
        flops //= 2  # as `Spec.flops` has it
    side_by_side = (problem.cut_of or spec.kv_heads) if can_be_cut(problem) else 1
    return max(1, min(flops // FLOPS_PER_THREAD, CORES // max(side_by_side, 1)))


# Seen of torch 2.13, and a test holds it: with rows of whole vectors and this many queries the bits of its fused
# operators do not change with the threads, where each has a task.
_FEWEST_QUERIES = 16
_BLOCK = 256  # queries, at most, of one task of the forward


def is_one_task(problem: Problem, row: Row) -> bool:
    """Whether a sequence alone may be one task of torch's fused operators, in which BLAS then has several threads.

    Among others it is a task of one thread: such a sequence has its own bits in a call of its own alone.
    """
    spec = problem.spec
    tasks = spec.kv_heads if spec.direction == "backward" else spec.q_heads * max(1, row.q_len // _BLOCK)
    return tasks < 2 and thread_count(problem, row) > 1


def with_all_threads(problem: Problem) -> Problem:
    """Return the problem with all of torch's threads where they do not change its bits, else the problem as it is.

    Not for gradients: on an Intel Xeon the operator's backward has other bits on two threads than on one in 462 of
    1,076 cases drawn at random, where its forward has the same in all of them.
    """
    spec = problem.spec
    if spec.direction == "backward" or not (problem.rows and whole_vectors(spec)):
        return problem
    shortest = min(row.q_len for row in problem.rows)
    blocks = max(1, shortest // _BLOCK)  # of a query head's rows, each a task
    if shortest < _FEWEST_QUERIES or spec.q_heads * blocks < 2:
        return problem
    if blocks < 2 and any(thread_count(problem, row) > 1 for row in problem.rows):  # for BLAS, inside the one task
        return problem
    return replace(problem, threads=torch.get_num_threads())


@contextmanager
def threads(problem: Problem, row: Row) -> Iterator[None]:
    """Run torch's CPU operations with the threads that `problem` may have; the count before is restored."""
    if problem.device.type != "cpu":
        yield
        return
    before, wanted = torch.get_num_threads(), problem.threads or thread_count(problem, row)
    if before != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_num_threads(before)


def aligned(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in `dtype`, contiguous and at an aligned address: itself where it is all that already, else a copy."""
    if t.dtype != dtype or not t.is_contiguous():
        t = t.to(dtype).contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)


def aligned_heads(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As `aligned`, but only the rows of a head, the last two dimensions, need lie together, each head aligned."""
    together = t.dtype == dtype and t.stride()[-2:] == (t.shape[-1], 1)
    if together and all(n * t.itemsize % _ALIGNMENT == 0 for n in t.stride()[:-2]) and t.data_ptr() % _ALIGNMENT == 0:
        return t
    return aligned(t, dtype)
