"""Perform tasks in the process of a `guard.Guard`. Only such processes import this module, because it imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, lru_cache
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_day.decode import decode, make_cache
from benchmarks.gpu_day.device import Cuda
from benchmarks.gpu_day.plan import Decode, Smoke, Task, Timed, Trial
from benchmarks.gpu_day.smoke import CHECKS, path_of_hopper, smoke
from flashpoint_kernels import Options, Problem
from flashpoint_kernels.problems import workspace
from flashpoint_kernels.problems.problem import DTYPES
from flashpoint_kernels.triton_backend import compile_ahead
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.host.calls import Call
from flashpoint_kernels.triton_backend.host.config import config_for
from flashpoint_kernels.triton_backend.host.configurations import Config, Tile

# Largest relative difference from the shipped tile. Another tile adds in another order, which changes only the rounding
# to bfloat16; a larger difference means that the compiler made a mistake.
_WRONG = 0.02
# The gradients that a kernel of a trial writes, by the second word of its name.
_WRITTEN = {"kv": ("dk", "dv"), "v": ("dv",), "k": ("dk",), "q": ("dq",)}


def describe(device: Cuda, _task: None) -> dict[str, Any] | None:
    """Return the description of the device, and the names of the smoke tests that it must pass."""
    description = device.describe()
    return description and {"checks": list(CHECKS)} | description


def perform(device: Cuda, task: Task) -> dict[str, Any]:
    """Measure a task, and return the row's `result`."""
    measures = {Smoke: smoke, Timed: timed, Trial: trial, Decode: decode}
    return measures[type(task)](device, task)


def compile_task(device: Cuda, task: Task) -> None:
    """Compile a task's kernels into Triton's cache on disk, from which the timing process loads them."""
    if isinstance(task, Trial):
        for call in _calls_of(device, task)[0]:
            call.compile()
    elif isinstance(task, Timed):
        with path_of_hopper(task.hopper, task.stored, task.two_sets):
            compile_ahead([_problem(device, task)]).result()
    elif isinstance(task, Decode) and not task.page:
        made = make_cache(device, task)
        whole = Problem.create({"q": made.q, "k": made.k, "v": made.v}, Options(layout="bshd"))
        compile_ahead([whole]).result()


ACTIONS = {"describe": describe, "perform": perform, "compile": compile_task}


def timed(device: Cuda, task: Timed) -> dict[str, Any]:
    device.measure_peaks(task.case.dtype)
    with _deterministic(task.deterministic), path_of_hopper(task.hopper, task.stored, task.two_sets):
        return device.measure(task.case)


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Make torch deterministic, but do not fill new memory with NaN, because the time would include that."""
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def _problem(device: Cuda, task: Timed) -> Problem:
    """Return a problem that launches the same kernels as a case."""
    case = task.case
    q = torch.zeros(case.batch, case.q_heads, case.q_len, case.head_dim, device=device.name, dtype=DTYPES[case.dtype])
    k = torch.zeros(case.batch, case.kv_heads, case.kv_len, case.head_dim, device=device.name, dtype=q.dtype)
    tensors = {"q": q, "k": k, "v": k}
    options = Options(causal=case.causal, return_lse=True)
    if case.direction == "forward":
        return Problem.create(tensors, options)
    return Problem.create(tensors | {"do": q}, Options(causal=case.causal), "backward")


def trial(device: Cuda, task: Trial) -> dict[str, Any]:
    """Time one tile of a kernel, and compare its answers with those of the reference, the shipped tile.

    The result has `refused` if the tile does not fit or the compiler fails, and `wrong_by`, the error, if answers are
    wrong.
    """
    shipped = getattr(_config(device, task), task.name)
    row = {**asdict(shipped if task.tile is None else Tile(*task.tile)), "shipped": task.tile is None, "ms": None}
    exact = _truth(device, replace(task, tile=None))
    try:
        ms, answers, made = _time(device, task)
    except Exception as error:
        if task.tile is None or device.is_lost():
            raise
        return row | {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(answers, exact, strict=True)]
    wrong = [each for each in errors if not each < _WRONG]  # this comparison also counts NaN as wrong
    return row | made | ({"wrong_by": wrong[0]} if wrong else {"ms": ms})


@lru_cache(maxsize=1)
def _truth(device: Cuda, task: Trial) -> list[Tensor]:
    return _time(device, task)[1]


def _time(device: Cuda, task: Trial) -> tuple[float, list[Tensor], dict[str, Any]]:
    """Return (median milliseconds, the answers, properties of the compiled kernel)."""
    calls, outputs = _calls_of(device, task)
    for output in outputs:
        output.fill_(float("nan"))
    for call in calls:
        call.args = cache(call.args)  # arguments are made once, before the timing

    def run() -> None:
        for call in calls:
            call.run()

    run()
    taken = device.milliseconds(run)
    try:
        made = device.occupancy(calls[0])
    except Exception as error:  # a release of Triton may rename the attributes that `occupancy` reads: keep the time
        made = {"occupancy": f"{type(error).__name__}: {error}"[:200]}
    return median(taken), outputs, made


def _config(device: Cuda, task: Trial) -> Config:
    dim = task.shape[-1]
    return config_for(torch.device(device.name), "bfloat16", dim, dim, 0, task.hopper)


def _calls_of(device: Cuda, task: Trial) -> tuple[list[Call], list[Tensor]]:
    """Return the calls of a trial's kernel, and the tensors that they write. All stored dS is in one chunk."""
    with path_of_hopper(task.hopper, task.stored), mock.patch.dict(os.environ, {workspace.BYTES: str(1 << 50)}):
        generator = torch.Generator(device.name).manual_seed(0)
        like = {"generator": generator, "device": device.name, "dtype": torch.bfloat16}
        tensors = {name: torch.randn(task.shape, **like) for name in ("q", "k", "v", "do")}
        config = _config(device, task)
        if task.tile is not None:
            config = replace(config, **{task.name: Tile(*task.tile)})
        options = Options(causal=True, return_lse=True)
        forward = Problem.create({name: tensors[name] for name in "qkv"}, options)
        if task.name == "forward":
            return list(launch.forward_calls([forward], config)), list(forward.outputs.values())
        launch.forward([forward])  # so that every tile computes the gradients from the same inputs
        backward = Problem.create({**tensors, **forward.outputs}, options, "backward")
        calls = list(launch.backward_calls([backward], [launch.scratch_of(backward)], config))
        kernel = f"attention_{task.kernel.replace('_storing', '')}"
        first = next(n for n, call in enumerate(calls) if call.kernel.__name__ == kernel)
        for call in calls[:first]:
            if task.stored or call.kernel.__name__ == "attention_delta":  # it writes what the kernel reads
                call.run()
        mine = [call for call in calls if call.kernel.__name__ == kernel]
        return mine, [backward.outputs[name] for name in _WRITTEN[task.name.split("_")[1]]]
