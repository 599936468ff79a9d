"""Make the bits of a CPU answer depend only on its own sequence: fix the number of threads and the alignment.

BLAS splits its sums by the number of threads, and selects its code by alignment. So the same rows could have other bits
next to other rows, or at another address. A request is cut by sequences and heads into parts that the cores compute in
parallel (`split`, `spread`), each on one thread if there are enough parts. This is also the fastest method: on 2 cores
at (1,8,1024,64), parts of one thread each reach 64 requests a second, and OpenMP's two threads reach 58.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpoint_contract.spec import Row
from flashpoint_kernels.problems import modes
from flashpoint_kernels.problems.cost import NOMINAL, Rates, row_seconds
from flashpoint_kernels.problems.problem import Problem, shared_by_heads

# Measured on 2 CPU cores with 8 heads, D 64 and one call a millisecond, with OMP_WAIT_POLICY=passive as in the server:
# a second thread makes a call of 18 MiFLOP 1/3 slower, one of 32 or 50 MiFLOP 1/5 slower, one of 72 MiFLOP 1/10 faster,
# and one of 128 MiFLOP 2/5 faster.
FLOPS_PER_THREAD = 1 << 25

# The predicted seconds of a part, by `cost.NOMINAL`. Views and calls of torch take a tenth of this time. With parts of
# a quarter of this length, a gradient at (1,8,128,64) took 7.2 ms; in one part it took 4.6 ms (2 cores, busy with other
# work).
PART_SECONDS = 3e-3

_TOGETHER = 1 << 20  # maximum elements of each of q, k, v and o in one call: 4 MiB in float32, which it may copy


def _cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use: the system's, or its container's quota if that is less."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.exists() and not (text := quota.read_text()).startswith("max"):
        spent, period = map(int, text.split())
        granted = min(granted, spent // period)
    return max(1, granted)


CORES = _cores()
_ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register, and the alignment of torch's allocator


def split(problem: Problem, backend: str) -> list[Problem]:
    """Return a CPU problem as parts of about PART_SECONDS, which may run in parallel and in any order.

    Cut between sequences; cut a sequence that is longer than a part between its key/value heads. If an output is a sum
    over sequences or heads, keep these together. The position of a cut does not change any bits.
    """
    if problem.cut_of or not problem.rows:
        return [problem]
    heads = problem.spec.kv_heads if can_be_cut(problem) else 1
    parts = []
    for start, stop, seconds in _runs(problem, NOMINAL[backend]):
        part = problem if stop - start == len(problem.rows) else problem.of_rows(start, stop)
        count = min(int(seconds / _part_seconds(problem)), heads)
        if count < 2:
            parts.append(part)
            continue
        edges = [n * heads // count for n in range(count + 1)]
        parts += [part.heads(first, last) for first, last in itertools.pairwise(edges)]
    return parts


def _runs(problem: Problem, rates: Rates) -> list[tuple[int, int, float]]:
    """Cut the sequences of a problem into runs of at most about PART_SECONDS. Return first, end and seconds of each."""
    limit = _part_seconds(problem) if _sums_no_sequences(problem) else float("inf")
    share = _share(problem)
    costs: dict[tuple[int, ...], float] = {}
    runs: list[tuple[int, int, float]] = []
    called: set[tuple[int, ...]] = set()
    start, seconds = 0, 0.0
    for place, row in enumerate(problem.rows):
        # q_len, kv_len, offset: read by index, which is faster than by attribute; there may be 65,536 rows
        lengths = row[3], row[6], row[8]
        if (cost := costs.get(lengths)) is None:
            cost = costs[lengths] = row_seconds(problem.spec, rates, row) * share
        added = cost if lengths in called else cost + rates.call
        if place > start and seconds + added > limit:
            runs.append((start, place, seconds))
            start, seconds, called = place, 0.0, set()
            added = cost + rates.call
        called.add(lengths)
        seconds += added
    return [*runs, (start, len(problem.rows), seconds)]


def _part_seconds(problem: Problem) -> float:
    """Return the seconds that a part should take: PART_SECONDS, or four times as many with a block mask.

    With a block mask operators are shorter, and threads lose more time with Python's lock. On 2 cores of an Intel Xeon
    at (1,8,2048,64) with 1/16 of the blocks, a forward took 16 ms in one part, 19 in two and 25 in five.
    """
    return PART_SECONDS * (4 if problem.spec.has("block_mask") else 1)


def _share(problem: Problem) -> float:
    """Return the fraction of a block mask's blocks that are true, thus computed; 1 without a block mask."""
    mask = problem.tensors.get("block_mask")
    return 1.0 if mask is None or not mask.numel() else float(mask.float().mean())


def _sums_no_sequences(problem: Problem) -> bool:
    """Return whether no output is a sum over sequences."""
    features, spec = problem.spec.features, problem.spec
    if "dattn_mask" in features and spec.batch > 1:
        shape = spec.tensors["attn_mask"].shape
        if len(shape) < spec.rank or shape[0] == 1:
            return False
    return "dsinks" not in features


def can_be_cut(problem: Problem) -> bool:
    """Return whether the problem can be cut by heads (see `Problem.heads`). True for a part, which was cut already."""
    spec = problem.spec
    if problem.cut_of:
        return True
    if "dattn_mask" in spec.features and shared_by_heads(spec.tensors["attn_mask"].shape):
        return False
    return spec.ragged or spec.rank == 4


def sharing(problem: Problem, row: Row) -> int:
    """Return how many sequences with the lengths of `row` may share an operator call without a change of their bits.

    This is more than 1 only if one such sequence runs on one thread; the shared call then also uses one thread.
    """
    spec = problem.spec
    if thread_count(problem, row) > 1:
        return 1
    elements = max(
        spec.q_heads * row.q_len * max(spec.head_dim, spec.value_dim),
        spec.kv_heads * row.kv_len * max(spec.head_dim, spec.value_dim),
    )
    return max(1, _TOGETHER // max(elements, 1))


def spread(calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls on all cores, the first in this thread, and return when all have ended.

    Raises the error of a failed call.
    """
    first, *others = calls
    inference = torch.is_inference_mode_enabled()  # each thread has its own mode
    running = [_pool().submit(_in_mode, inference, call) for call in others]
    try:
        first()
    finally:
        wait(running)
    for done in running:
        done.result()


def _in_mode(inference: bool, call: Callable[[], None]) -> None:
    # A thread follows tangents of dual numbers by default, also where the caller's thread does not.
    with torch.inference_mode(inference), forward_ad._set_fwd_grad_enabled(False):
        call()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, "flashpoint-core")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no threads of its parent


def thread_count(problem: Problem, row: Row) -> int:
    """Return the threads for one sequence of `problem`: one for each FLOPS_PER_THREAD of 2·Hq·sq·sk·(D + Dv).

    The maximum is the number of cores. If heads run in parallel, it is the number of cores divided by that of the
    request's key/value heads.
    """
    spec = problem.spec
    flops = 2 * spec.q_heads * row.q_len * row.kv_len * (spec.head_dim + spec.value_dim)
    if spec.causal_square:
        flops //= 2  # as in `Spec.flops`
    side_by_side = (problem.cut_of or spec.kv_heads) if can_be_cut(problem) else 1
    return max(1, min(flops // FLOPS_PER_THREAD, CORES // max(side_by_side, 1)))


def threads(problem: Problem, row: Row) -> exactly:
    """Return a context manager that sets torch's number of threads for `problem`, whose longest sequence is `row`."""
    return exactly(0 if problem.device.type != "cpu" else thread_count(problem, row))


class exactly:  # noqa: N801  # a context manager, whose name reads as a word
    """Run torch's CPU operations with `count` threads (0: no change), and restore the number of threads at the end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._before = 0

    def __enter__(self) -> int:
        if self._count and (before := torch.get_num_threads()) != self._count:
            torch.set_num_threads(self._count)
            self._before = before
        return self._count

    def __exit__(self, *_: object) -> None:
        if self._before:
            torch.set_num_threads(self._before)


def flushing(problem: Problem, threads: int) -> AbstractContextManager[None]:
    """Treat denormal numbers as zeros in this thread, if `problem` has ALiBi and runs only on this thread.

    Far keys have probabilities below 1e-38 of the largest. They do not change an answer, but products with them take
    2.5 times as long (on an Intel Xeon, with a slope of 0.25). This setting does not reach torch's own threads. So the
    bits of an answer depend on the number of threads, which depends only on the sequence's shape.
    """
    return modes.flushing(threads == 1 and problem.spec.has("alibi_slopes"))


def aligned(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `t` in `dtype`, contiguous and aligned: `t` itself if it is so already, else a copy."""
    if t.dtype != dtype or not t.is_contiguous():
        t = t.to(dtype).contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)
