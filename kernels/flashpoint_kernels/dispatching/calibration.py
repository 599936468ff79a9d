"""Measure the `cost.Rates` of a backend on one core of this CPU: `problems/cost.py` predicts running times from them.

Each rate is a difference of the times of two small problems. To measure all backends takes about 0.2 s. The clock is
the thread's processor time, so that other programs do not change the rates. For a GPU nothing is measured: `of_gpu`
uses its peak FLOP/s and the nominal rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from flashpoint_contract.options import OPTIONS, Options
from flashpoint_contract.tensors import FEATURES, TENSORS
from flashpoint_kernels.dispatching.dispatch import run_part
from flashpoint_kernels.dispatching.support import SUPPORT
from flashpoint_kernels.problems.cost import NOMINAL, SCORE_FEATURES, Rates, nominal_option
from flashpoint_kernels.problems.problem import DTYPES, Problem
from flashpoint_kernels.problems.reproducible import split

_REPEATS = 2  # repetitions of a timing; the shortest time counts
_LENGTH = {"cpu": 256, "tiled": 256, "reference": 96}  # sequence lengths that take some milliseconds
_NARROW, _WIDE = 16, 128  # head dimensions
_TYPES = {"cpu": ("float16", "bfloat16")}  # 16-bit types that have kernels of their own, beside float32
_KEYS = 1 << 17  # keys of each of two heads; k and v together have 32 MiB
_SEQUENCES = {"cpu": 2048, "tiled": 2048, "reference": 16}
_LEAST = 0.1  # fraction of the nominal rate that replaces a smaller measured rate: noise can make it 0
_OF_PEAK = 0.3  # assumed fraction of a GPU's peak that a kernel reaches; not measured
_INTERPRETED = Rates(2e-2, 1e-2, 1e-9, 1e-7, {})  # Triton's interpreter, measured once; nobody uses it for serving


def measure(backend: str) -> Rates:
    """Return the rates of a backend on one core of this CPU."""
    if backend == "triton":
        return _INTERPRETED
    length, count = _LENGTH[backend], _SEQUENCES[backend]
    narrow = _problem(1, length, _NARROW)
    one, many = (_seconds(partial(_solve, _problem(n, 1, _NARROW), backend)) for n in (1, count))
    slow = _seconds(partial(run_part, narrow, backend))
    scores = length * length * narrow.spec.q_heads
    nominal = NOMINAL[backend]
    sequence = max((many - one) / (count - 1), _LEAST * nominal.sequence)
    flop = _flop(backend, length, "float32")
    types = {name: _flop(backend, length, name) for name in _TYPES.get(backend, ())}
    score = max((slow - one - narrow.flops * flop) / scores, _LEAST * nominal.score)
    options = {}
    for name in SCORE_FEATURES:
        if name in SUPPORT[backend]:
            problem = _with_feature(narrow, name)
            taken = _seconds(partial(run_part, problem, backend)) - slow
            options[name] = max(taken / scores, _LEAST * nominal_option(backend, name))
    byte = _byte(backend, one, flop, score) if nominal.byte else 0.0
    return Rates(max(one - sequence, _LEAST * nominal.call), sequence, flop, score, options, byte, types)


def _flop(backend: str, length: int, dtype: str) -> float:
    """Return the measured seconds per FLOP, for one data type of q, k and v."""
    problems = [_problem(1, length, dim, dtype) for dim in (_NARROW, _WIDE)]
    slow, slower = (_seconds(partial(run_part, problem, backend)) for problem in problems)
    return max((slower - slow) / (problems[1].flops - problems[0].flops), _LEAST * NOMINAL[backend].flop)


def _byte(backend: str, call: float, flop: float, score: float) -> float:
    """Return the measured seconds to read one byte of keys and values, from a problem with one query."""
    q, k, v = (
        torch.full((1, 2, length, _NARROW), 0.1, dtype=torch.float32, device="cpu") for length in (1, _KEYS, _KEYS)
    )
    problem = Problem.create({"q": q, "k": k, "v": v}, Options())
    taken = _seconds(partial(run_part, problem, backend)) - call - problem.flops * flop - k.shape[2] * 2 * score
    return max(taken / (k.nbytes + v.nbytes), _LEAST * NOMINAL[backend].byte)


def _solve(problem: Problem, backend: str) -> None:
    """Run a problem of many sequences as an engine does: cut it into parts, and run one part after another."""
    for part in split(problem, backend):
        run_part(part, backend)


def of_gpu(backend: str, peak: float) -> Rates:
    """Return the rates of a backend on a GPU that multiplies matrices at `peak` FLOP/s."""
    rates = NOMINAL[backend]
    return rates._replace(flop=1 / (_OF_PEAK * peak), score=0.0, options={})


def _problem(sequences: int, length: int, dim: int, dtype: str = "float32") -> Problem:
    t = torch.full((sequences, 2, length, dim), 0.1, dtype=DTYPES[dtype], device="cpu")
    return Problem.create(dict.fromkeys(("q", "k", "v"), t), Options())


def _with_feature(problem: Problem, name: str) -> Problem:
    """Return the same problem with one more feature, which an option or a tensor requests."""
    spec, tensors, options = problem.spec, dict(problem.tensors), problem.spec.options
    field, feature = FEATURES[name]
    if field in OPTIONS:
        options = replace(options, **{"dropout_seed": 0, field: OPTIONS[field].example})
    else:
        row = TENSORS[field]
        dtype = next(dtype for dtype in row.dtypes if dtype in ("bool", "float32") and row.feature(dtype) == feature)
        shape = row.shape(spec.sizes | ({"B": 1, "Hq": 1} if row.broadcast else {}), options.layout, spec.rank)
        tensors[field] = torch.ones(shape, dtype=DTYPES[dtype], device="cpu")
    return Problem.create(tensors, options)


def _seconds(call: Callable[[], None]) -> float:
    """Return the smallest processor time of the thread, in `_REPEATS` calls after a warm-up call."""
    call()
    taken = []
    for _ in range(_REPEATS):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return min(taken)
