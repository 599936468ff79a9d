"""Run the operator in a process without HTTP: an upper bound of a service's speed.

Reads lines of JSON, {"way", "shape", "gradient", "calls"}, and prints the seconds of the calls. Ways: `run` is the
engine's operator, `sdpa` torch's; on one core, on all cores for each call, or on all cores with parallel calls.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from op import attend

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.problems.reproducible import split

CORES = os.cpu_count() or 1
POOL = ThreadPoolExecutor(CORES)


def problem(tensors: dict[str, torch.Tensor]) -> Problem:
    return Problem.create(tensors, Options(), "backward" if "do" in tensors else "forward")


def run_on_one(tensors: dict[str, torch.Tensor]) -> None:
    """Run the parts of the call one after the other, as a lane of the engine does."""
    for part in split(problem(tensors), "torch"):
        run([part], "torch")


def run_on_all(tensors: dict[str, torch.Tensor]) -> None:
    run([problem(tensors)], "torch")


def one_by_one(call: Callable[[dict[str, torch.Tensor]], object]) -> Callable[..., None]:
    def calls(tensors: dict[str, torch.Tensor], count: int) -> None:
        for _ in range(count):
            call(tensors)

    return calls


def side_by_side(tensors: dict[str, torch.Tensor], count: int) -> None:
    for _ in POOL.map(lambda _: run_on_one(tensors), range(count)):
        pass


# Each way with torch's threads; `run` sets the number itself.
WAYS = {
    "run_one": (one_by_one(run_on_one), 1),
    "run_all": (one_by_one(run_on_all), 1),
    "run_side_by_side": (side_by_side, 1),
    "sdpa_one": (one_by_one(attend), 1),
    "sdpa_all": (one_by_one(attend), CORES),
}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        names = ("q", "k", "v", "do") if request["gradient"] else ("q", "k", "v")
        generator = torch.Generator().manual_seed(0)
        inputs = {name: torch.rand(request["shape"], generator=generator) for name in names}
        calls, threads = WAYS[request["way"]]
        torch.set_num_threads(threads)
        began = time.perf_counter()
        calls(inputs, request["calls"])
        print(time.perf_counter() - began, flush=True)
