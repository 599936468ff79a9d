"""Run the operator in a process without HTTP: an upper bound of a service's speed. throughput.py starts the process.

The timed functions are `run`, the engine's operator, and `sdpa`, torch's operator. Both run on one core, and on all
cores for each call; `run` also runs parallel calls, one on each core.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat

import torch
from peers.op import attend

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.problems.reproducible import split

CORES = os.cpu_count() or 1
POOL = ThreadPoolExecutor(CORES)
Tensors = dict[str, torch.Tensor]


def computed(tensors: Tensors, in_parts: bool = True) -> Tensors:
    """Return the outputs of a call. With `in_parts`, compute its parts one after another, as the engine does."""
    problem = Problem.create(tensors, Options(), "backward" if "do" in tensors else "forward")
    for part in split(problem, "cpu") if in_parts else [problem]:
        run([part], "cpu")
    return problem.outputs


def timed(
    call: Callable[[Tensors], object], threads: int, shape: tuple[int, ...], gradient: bool, count: int,
    side_by_side: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of `count` calls, each with `threads` threads of torch.

    The calls run one after another or, with `side_by_side`, at the same time on all cores.
    """
    names = ("q", "k", "v", "do") if gradient else ("q", "k", "v")
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.rand(shape, generator=generator) for name in names}
    torch.set_num_threads(threads)
    began = time.perf_counter()
    deque((POOL.map if side_by_side else map)(call, repeat(inputs, count)), maxlen=0)
    return time.perf_counter() - began


# Each timed function with torch's number of threads; `run` sets this number itself.
WAYS = {
    "run_one": partial(timed, computed, 1),
    "run_all": partial(timed, partial(computed, in_parts=False), 1),
    "run_side_by_side": partial(timed, computed, 1, side_by_side=True),
    "sdpa_one": partial(timed, attend, 1),
    "sdpa_all": partial(timed, attend, CORES),
}
