"""A problem that runs again on the CPU reads its tensors again, and has the bits of a new problem."""

from typing import Any

import pytest
import torch

from flashpoint_kernels.torch_backend import cpu
from tests.support.kernels.solving import backward, forward, forward_of, normal, qkv


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 3, 50, 32), {}),
        ((1, 2, 70, 90, 40), {"causal": True, "softcap": 2.0}),
        ((3, 2, 1, 1100, 16), {"window": (700, 0)}),
    ],
)
def test_a_problem_that_runs_again_has_the_bits_of_a_new_one(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    t = {name: x.cpu() for name, x in qkv(*shape).items()}  # type: ignore[misc]
    problem = forward_of(t, **options)
    for seed in range(3):
        t["q"].copy_(normal(*t["q"].shape, seed=20 + seed))
        t["v"].copy_(normal(*t["v"].shape, seed=40 + seed))
        for answer in problem.outputs.values():
            answer.fill_(torch.nan)
        cpu.forward([problem])
        for name, x in forward("torch", t, **options).items():
            assert torch.equal(problem.outputs[name], x), name


def test_problems_run_one_by_one_and_padding_is_cleared() -> None:
    requests = [qkv(2, 2, 5, 7, 16, seed=n) | {"q_lengths": torch.tensor([2, n])} for n in range(3)]
    problems = [forward_of(t) for t in requests]
    for problem in problems:
        problem.outputs["o"].fill_(torch.nan)
    cpu.forward(problems)
    for n, (t, problem) in enumerate(zip(requests, problems, strict=True)):
        assert not problem.outputs["o"][0, :, 2:].any()
        assert not problem.outputs["o"][1, :, n:].any()
        gradients = backward("torch", t | problem.outputs)
        assert all(torch.equal(x, gradients[name]) for name, x in backward("torch", t).items())
