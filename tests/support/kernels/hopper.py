"""Helpers for tests of the path for Hopper and of stored dS: tiles, a case, and the kernels that a problem launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.problems.problem import with_forwards
from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.host.launch import backward_calls, forward_calls
from tests.conftest import DEVICE
from tests.support.kernels.solving import qkv
from tests.support.kernels.triton_cases import PLAIN

ON_SM_90 = pytest.mark.skipif(config.chip_of(torch.device(DEVICE)).arch != 90, reason="the path of sm_90")
TILES = config.config_for(torch.device(DEVICE), "float16", 16, 16, 0, True)
HALF = PLAIN | {"dtype": "float16"}


def kernels(tensors: dict[str, torch.Tensor], options: Options) -> list[str]:
    """Return the names of the forward kernels that would run for a problem."""
    problem = Problem.create({n: t for n, t in tensors.items() if n not in ("do", "dlse")}, options)
    return [call.kernel.__name__ for call in forward_calls([problem]) if call.programs]


def backward_kernels(tensors: dict[str, torch.Tensor], options: Options) -> list[str]:
    problem = Problem.create(tensors, options, "backward")
    _, whole = with_forwards([problem])
    return [call.kernel.__name__ for call in backward_calls(whole, [{}]) if call.programs]


def answers(
    problems: list[Problem], order: list[int] | None = None, workspace: int | None = None
) -> list[dict[str, Tensor]]:
    """Run the problems in one launch, in an order, and return their answers in the problems' own order."""
    with pytest.MonkeyPatch.context() as patch:
        if workspace is not None:
            patch.setenv("FLASHPOINT_WORKSPACE_BYTES", str(workspace))
        for problem in problems:
            for t in problem.outputs.values():
                t.fill_(float("nan"))
        run([problems[n] for n in order or range(len(problems))], "triton")
    return [{name: t.clone() for name, t in problem.outputs.items()} for problem in problems]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, t in actual.items():
        assert torch.equal(t, expected[name]), name
        assert not t.isnan().any(), name


def assert_keys_beyond_the_last_add_nothing(dim: int) -> None:
    """Compare dQ of stored dS with dQ of two passes where dS of keys beyond the last is infinite.

    A tile's keys beyond the last have scores of 0. Beside scores of −400 their P is 1, and their dS is −delta, about
    −3·10⁵, which float16 cannot hold; dQ would multiply it with the zeros of these keys.
    """
    tensors = qkv(1, 1, 70, 100, dim, dtype=torch.float16)
    tensors["q"] = tensors["q"] / 16 + 40 / dim**0.25
    tensors["k"] = tensors["k"] / 16 - 10 / dim**0.25
    tensors["v"], tensors["do"] = tensors["v"] + 200, tensors["do"] / 16 + 1600 / dim
    problem = Problem.create(tensors, Options(), "backward")
    (actual,) = answers([problem])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHPOINT_STORE_DS", "0")
        (expected,) = answers([problem])
    assert not any(t.isnan().any() for t in actual.values())
    torch.testing.assert_close(actual["dq"], expected["dq"], rtol=0.01, atol=float(expected["dq"].abs().max()) / 100)
