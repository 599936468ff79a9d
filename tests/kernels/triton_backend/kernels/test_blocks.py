"""A block mask in a launch does not affect the other problems of the launch."""

from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, run, verify
from flashpoint_kernels.problems.problem import launch_key
from tests.support.kernels.serving import drawn_blocks
from tests.support.kernels.solving import qkv


def mixed() -> list[tuple[dict[str, torch.Tensor], Options]]:
    """Return requests for one launch that differ in block size and lengths, and in whether heads share a mask."""
    requests = []
    for n, (size, heads, lengths, lead) in enumerate([
        ((16, 16), (2, 2), (40, 70), (1, 2)),
        ((64, 32), (4, 2), (70, 40), (2, 1)),
        ((16, 48), (2, 1), (3, 100), (2, 2)),
        ((128, 128), (1, 1), (33, 65), (1, 1)),
        ((16, 16), (2, 1), (1, 150), (1, 1)),
    ]):  # fmt: skip
        tensors = qkv(2, heads[0], *lengths, 16, kv_heads=heads[1], seed=n)
        blocks = (-(-length // m) for length, m in zip(lengths, size, strict=True))
        tensors["block_mask"] = drawn_blocks(*lead, *blocks, seed=n)
        requests.append((tensors, Options(block_size=size, backend="triton", causal=n == 0)))
    return requests


def solved(requests: list[tuple[dict[str, torch.Tensor], Options]], direction: Any) -> list[dict[str, torch.Tensor]]:
    made = []
    for tensors, options in requests:
        inputs = {name: t for name, t in tensors.items() if name != "do" or direction == "backward"}
        made.append(Problem.create(inputs, options, direction))
    assert len({launch_key(problem.spec, "triton") for problem in made}) == 1
    for problem in made:
        for t in problem.outputs.values():
            t.fill_(torch.nan)
    run(made, "triton")
    return [problem.outputs for problem in made]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_neighbours_of_one_launch_change_no_bits(direction: str) -> None:
    requests = mixed() if direction == "forward" else mixed()[1:4]
    for (tensors, options), answer in zip(requests, solved(requests, direction), strict=True):
        (alone,) = solved([(tensors, options)], direction)
        for name, t in alone.items():
            assert torch.equal(t, answer[name]), name
        if direction == "forward":
            assert verify({name: t for name, t in tensors.items() if name != "do"}, options).ok
