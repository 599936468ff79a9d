"""A problem that runs again with other numbers in the same memory has the bits of a new problem."""

import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.cpu_backend import run as cpu
from flashpoint_kernels.native import backward as native_backward
from flashpoint_kernels.native import forward as native_forward
from tests.support.kernels.solving import backward, forward_of, qkv

GRADS = ["dq", "dk", "dv"]
OPTIONS = [
    {}, {"causal": True}, {"window": (9, 3)}, {"softcap": 2.0}, {"return_lse": True}, {"layout": "bshd"},
    {"dropout_p": 0.4, "dropout_seed": 7},
]  # fmt: skip


def problem_of(direction: str, tensors: dict[str, torch.Tensor], options: dict[str, Any], threads: int) -> Problem:
    return replace(Problem.create(tensors, Options(**options), direction), threads=threads)


def outputs(problem: Problem, direction: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        (cpu.forward if direction == "forward" else cpu.backward)([problem])
    return {name: t.clone() for name, t in problem.outputs.items()}


@given(
    direction=st.sampled_from(["forward", "backward"]), options=st.sampled_from(OPTIONS), threads=st.integers(1, 3),
    queries=st.integers(1, 70), keys=st.integers(1, 90), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_lse=st.booleans(), several=st.booleans(),
)  # fmt: skip
def test_a_problem_runs_again_with_other_numbers(
    direction: str, options: dict[str, Any], threads: int, queries: int, keys: int, dtype: torch.dtype, with_lse: bool,
    several: bool,
) -> None:  # fmt: skip
    """A problem that runs again with other numbers, on up to three threads, has the bits of a new one on one thread."""
    batch = native_forward.TOGETHER if several else 2
    queries, keys = (min(queries, 5), min(keys, 5)) if several else (queries, keys)
    if direction == "backward":
        options = {name: value for name, value in options.items() if name != "return_lse"}
    lengths = {"q": queries, "k": keys, "v": keys, "do": queries}
    names = ["q", "k", "v"] if direction == "forward" else ["q", "k", "v", "do"]
    rows_first = options.get("layout") == "bshd"
    shapes = {n: (batch, lengths[n], 2, 16) if rows_first else (batch, 2, lengths[n], 16) for n in names}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}

    def with_forward() -> dict[str, torch.Tensor]:
        """Return the inputs; if `with_lse`, those of a gradient include o and lse of their forward."""
        if direction == "forward" or not with_lse:
            return tensors
        inputs = {name: tensors[name] for name in "qkv"}
        return tensors | outputs(problem_of("forward", inputs, {**options, "return_lse": True}, 1), "forward")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_forward, "_LEAST_BYTES", 1)
        patch.setattr(native_backward, "_LEAST_FLOPS", 1)
        patch.setattr(native_backward, "_ROWS", 32)
        held = with_forward()
        problem = problem_of(direction, held, options, threads)
        for _ in range(3):
            again, fresh = outputs(problem, direction), outputs(problem_of(direction, held, options, 1), direction)
            assert all(torch.equal(again[name], fresh[name]) for name in fresh)
            for t in tensors.values():
                t.copy_(torch.randn(t.shape))
            for name, t in with_forward().items():
                held[name].copy_(t)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_problem_with_a_tiny_scale_runs_again_with_larger_numbers(direction: str) -> None:
    """Products of the larger numbers exceed float32, so q and the scale must be changed for them alone (ranges.py)."""
    tensors = {name: torch.randn(1, 2, 8, 16) for name in ("q", "k", "v", "do")[: 3 if direction == "forward" else 4]}
    options = {"scale": 2.0**-134}
    problem = problem_of(direction, tensors, options, 1)
    outputs(problem, direction)
    for name in "qk":
        tensors[name].mul_(2.0**66)
    again, fresh = outputs(problem, direction), outputs(problem_of(direction, tensors, options, 1), direction)
    assert all(torch.equal(again[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_problem_that_is_dropped_frees_its_memory(direction: str) -> None:
    """A deleted problem frees its memory at once: its `calls` refer to its tensors, not to it, so there is no cycle."""
    tensors = {name: torch.randn(1, 1, 4, 16) for name in ("q", "k", "v", "do")[: 3 if direction == "forward" else 4]}
    problem = problem_of(direction, tensors, {}, 1)
    outputs(problem, direction)
    assert problem.calls
    watched = ref(problem.outputs["o" if direction == "forward" else "dq"])
    gc.disable()
    try:
        del problem
        assert watched() is None
    finally:
        gc.enable()


def test_problems_run_one_by_one_and_padding_is_cleared() -> None:
    requests = [qkv(2, 2, 5, 7, 16, seed=n) | {"q_lengths": torch.tensor([2, n])} for n in range(3)]
    problems = [forward_of(t) for t in requests]
    for problem in problems:
        problem.outputs["o"].fill_(torch.nan)
    cpu.forward(problems)
    for n, (t, problem) in enumerate(zip(requests, problems, strict=True)):
        assert not problem.outputs["o"][0, :, 2:].any()
        assert not problem.outputs["o"][1, :, n:].any()
        gradients = backward("cpu", t | problem.outputs)
        assert all(torch.equal(x, gradients[name]) for name, x in backward("cpu", t).items())
