"""Make the bits of a CPU answer depend on its own sequence alone: fix the thread count and the alignment of memory.

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

from flashpoint_contract.spec import Row, Spec
from flashpoint_kernels.cost import NOMINAL, Rates, row_seconds
from flashpoint_kernels.problem import Problem, shared_by_heads

# Measured on 2 CPU cores, 8 heads, D 64, a call a millisecond, threads asleep while they wait, as in the server: a
# second thread costs a third at 18 MiFLOP, a fifth at 32 and 50, and saves a tenth at 72, two fifths at 128.
FLOPS_PER_THREAD = 1 << 25

# Predicted seconds of a part, by `cost.NOMINAL`. Views and calls of torch cost a tenth of that: parts of a quarter made
# a gradient at (1,8,128,64) take 7.2 ms where one part takes 4.6 (2 cores, busy with other work).
PART_SECONDS = 3e-3

CHUNK = 1024  # keys, see torch_backend.few
_MOST_ROWS, _LEAST_KEYS = 64, 512  # of `few_queries`; with fewer keys torch's operator does as well as it can
_VECTOR = 16  # float32s of an AVX-512 register
_TOGETHER = 1 << 20  # elements of q, of k or of the scores in one call: 4 MiB in float32, which a call may copy


def _cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may run on: those that the system grants it, or its container's quota where less."""
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.exists() and not (text := quota.read_text()).startswith("max"):
        spent, period = map(int, text.split())
        granted = min(granted, spent // period)
    return max(1, granted)


CORES = _cores()
_ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register, and what torch's allocator gives


def split(problem: Problem, backend: str) -> list[Problem]:
    """Return a problem of the CPU as parts of about PART_SECONDS, which may run at the same time and in any order.

    It is cut between sequences, and a sequence that is longer than a part is cut between its key/value heads. An
    output that is a sum over sequences or heads keeps these together. The place of a cut does not change bits.
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


def in_one_part(problem: Problem, backend: str) -> bool:
    """Whether `split` leaves a problem whole. Its tensors are not looked at."""
    heads = problem.spec.kv_heads if can_be_cut(problem) else 1
    runs = _runs(problem, NOMINAL[backend])
    return len(runs) == 1 and min(int(runs[0][2] / PART_SECONDS), heads) < 2


def _runs(problem: Problem, rates: Rates) -> list[tuple[int, int, float]]:
    """Cut the sequences of a problem into runs of about PART_SECONDS at most: first, end and seconds of each."""
    most = _part_seconds(problem) if _sums_no_sequences(problem) else float("inf")
    share = _share(problem)
    costs: dict[tuple[int, int], float] = {}
    runs: list[tuple[int, int, float]] = []
    called: set[tuple[int, int]] = set()
    start, seconds = 0, 0.0
    for place, row in enumerate(problem.rows):
        lengths = row[3], row[6]  # q_len and kv_len; by number, for there may be 65,536 of them
        if (cost := costs.get(lengths)) is None:
            cost = costs[lengths] = row_seconds(problem.spec, rates, row) * share
        added = cost if lengths in called else cost + rates.call
        if place > start and seconds + added > most:
            runs.append((start, place, seconds))
            start, seconds, called = place, 0.0, set()
            added = cost + rates.call
        called.add(lengths)
        seconds += added
    return [*runs, (start, len(problem.rows), seconds)]


def _part_seconds(problem: Problem) -> float:
    """Seconds of a part. With a block mask operators are shorter, and threads lose more as they hand on Python's lock.

    On 2 cores of an Intel Xeon, at (1,8,2048,64) with 1/16 of the blocks, a forward took 16 ms in one part, 19 in two
    and 25 in five.
    """
    return PART_SECONDS * (4 if problem.spec.has("block_mask") else 1)


def _share(problem: Problem) -> float:
    """How much of its work is left by a block mask."""
    mask = problem.tensors.get("block_mask")
    return 1.0 if mask is None or not mask.numel() else float(mask.float().mean())


def _sums_no_sequences(problem: Problem) -> bool:
    """Whether no output is a sum over sequences."""
    features, spec = problem.spec.features, problem.spec
    if "dattn_mask" in features and spec.batch > 1:
        shape = spec.tensors["attn_mask"].shape
        if len(shape) < spec.rank or shape[0] == 1:
            return False
    return "dsinks" not in features


def can_be_cut(problem: Problem) -> bool:
    """Whether its heads can be told apart, and nothing is summed over them: see `Problem.heads`. A part was."""
    spec = problem.spec
    if problem.cut_of:
        return True
    if "dattn_mask" in spec.features and shared_by_heads(spec.tensors["attn_mask"].shape):
        return False
    return spec.ragged or spec.rank == 4


def sharing(problem: Problem, row: Row) -> int:
    """Return how many sequences of the lengths of `row` may share a call of an operator, with the bits each has alone.

    Each runs on one thread alone, and then so does the call. With all threads (`with_all_threads`) a call keeps its
    bits where sequences have no mask. tests/kernels/test_reproducible.py holds both for torch's operators.
    """
    spec = problem.spec
    if problem.threads > 1 and spec.has("attn_mask"):
        return 1
    if not problem.threads and thread_count(problem, row) > 1:
        return 1
    elements = max(
        spec.q_heads * row.q_len * max(spec.head_dim, spec.value_dim),
        spec.kv_heads * row.kv_len * max(spec.head_dim, spec.value_dim),
    )
    return max(1, _TOGETHER // max(elements, 1))


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
    if spec.causal_square:
        flops //= 2  # as `Spec.flops` has it
    side_by_side = (problem.cut_of or spec.kv_heads) if can_be_cut(problem) else 1
    return max(1, min(flops // FLOPS_PER_THREAD, CORES // max(side_by_side, 1)))


def few_queries(spec: Spec, row: Row) -> bool:
    """Whether so few queries see all keys of a sequence that the memory's speed is the bound.

    On the CPU `torch` answers them in a way of its own (torch_backend.few), whose bits do not change with the threads.
    """
    if row.kv_len < _LEAST_KEYS or not 0 < row.q_len * spec.q_heads <= _MOST_ROWS * spec.kv_heads:
        return False
    if not whole_vectors(spec) or spec.has("attn_mask") or spec.has("alibi_slopes"):
        return False
    offset, (left, right) = spec.offset(row.q_len, row.kv_len), spec.window
    return right >= row.kv_len - 1 - offset and left >= row.q_len - 1 + offset


# Seen of torch 2.13, and a test holds it: with rows of whole vectors and this many queries the bits of its fused
# operators do not change with the threads, where each has a task.
_FEWEST_QUERIES = 16
_BLOCK = 256  # queries, at most, of one task of the forward


def with_all_threads(problem: Problem) -> Problem:
    """Return the problem with all of torch's threads where they do not change its bits, else the problem as it is.

    Not for gradients: on an Intel Xeon the operator's backward has other bits on two threads than on one in 462 of
    1,076 cases drawn at random, where its forward has the same in all of them.
    """
    spec = problem.spec
    if spec.direction == "backward" or not (problem.rows and whole_vectors(spec)):
        return problem
    few = [spec.kv_len >= _LEAST_KEYS and few_queries(spec, row) for row in problem.rows]
    if all(few) and not (spec.paged and spec.page_size % CHUNK):  # else chunks are copied: faster done side by side
        return replace(problem, threads=torch.get_num_threads())
    if any(few):
        return problem
    shortest = min(row.q_len for row in problem.rows)
    blocks = max(1, shortest // _BLOCK)  # of a query head's rows, each a task
    if spec.has("alibi_slopes"):  # one thread flushes denormal numbers, see `flushing`
        return problem
    if shortest < _FEWEST_QUERIES or spec.q_heads * blocks < 2:
        return problem
    if spec.q_heads < 2 and any(in_blocks(spec, row) for row in problem.rows):  # whose calls are of few queries
        return problem
    if blocks < 2 and any(thread_count(problem, row) > 1 for row in problem.rows):  # for BLAS, inside the one task
        return problem
    return replace(problem, threads=torch.get_num_threads())


def in_blocks(spec: Spec, row: Row) -> bool:
    """Whether `torch` computes a sequence in blocks of queries (torch_backend.blocks), if it has no mask."""
    offset, (left, right) = spec.offset(row.q_len, row.kv_len), spec.window
    diagonal = right == 0 and offset == 0  # the operators' own
    sees_all = right >= row.kv_len - 1 - offset  # the first query does
    return left < row.q_len + offset - 1 or not (diagonal or sees_all) or spec.has("alibi_slopes")


def threads(problem: Problem, row: Row) -> exactly:
    """Run torch's CPU operations with the threads that `problem` may have, of which `row` is the longest sequence."""
    return exactly(0 if problem.device.type != "cpu" else problem.threads or thread_count(problem, row))


class exactly:  # noqa: N801  # a context manager, which reads as a word
    """Run torch's CPU operations with `count` threads, 0 for as many as there are; the count before is restored."""

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


@contextmanager
def flushing(problem: Problem, threads: int) -> Iterator[None]:
    """Take denormal numbers for 0 in this thread, where `problem` has ALiBi and runs on it alone.

    Far keys have probabilities of less than 1e-38 of the largest. They add nothing to an answer, and products with them
    take 2.5 times as long (on an Intel Xeon, with a slope of 0.25). Threads of torch's own are not told, so that the
    bits of an answer depend on the number of threads, which is a function of the sequence's own shape.
    """
    wanted = threads == 1 and problem.spec.has("alibi_slopes") and bool(_DENORMAL * 1.0 != 0.0)
    if wanted:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if wanted:
            torch.set_flush_denormal(False)


_DENORMAL = torch.tensor(1e-40)


def aligned(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in `dtype`, contiguous and at an aligned address: itself where it is all that already, else a copy."""
    if t.dtype != dtype or not t.is_contiguous():
        t = t.to(dtype).contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)


def aligned_heads(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As `aligned`, but only the rows of a head, the last two dimensions, need lie together, each head aligned."""
    if t.is_contiguous() and t.dtype == dtype and not t.data_ptr() % _ALIGNMENT:
        return t
    *outer, row, column = t.stride()
    if t.dtype != dtype or row != t.shape[-1] or column != 1 or t.data_ptr() % _ALIGNMENT:
        return aligned(t, dtype)
    for n in outer:  # a loop takes half the time of `all` with a generator
        if n * t.itemsize % _ALIGNMENT:
            return aligned(t, dtype)
    return t


def whole_vectors(spec: Spec) -> bool:
    """Return whether rows are whole vectors: then the order of sums in torch's fused CPU operators is fixed."""
    return spec.head_dim % _VECTOR == 0 and spec.value_dim % _VECTOR == 0
