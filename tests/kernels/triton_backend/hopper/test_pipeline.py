"""The pipeline of the kernels for Hopper skips blocks without work: missing heads, and sequences without keys."""

import pytest
import torch

from flashpoint_kernels import Options, Problem, run
from tests.conftest import DEVICE
from tests.support.kernels.hopper import ON_SM_90

pytestmark = ON_SM_90


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_path")
def test_heads_that_a_sequence_has_not_and_sequences_that_see_nothing() -> None:
    """In a launch with problems of more heads, a problem has the same bits as alone; without keys o is 0 and lse −∞."""
    g = torch.Generator().manual_seed(3)
    problems: dict[str, list[Problem]] = {"forward": [], "backward": []}
    for heads, q_len, kv_len in ((1, 70, 33), (3, 33, 40), (2, 40, 0)):
        tensors = {
            name: torch.randn((1, heads, n, 16), generator=g).half().to(DEVICE)
            for name, n in (("q", q_len), ("k", kv_len), ("v", kv_len), ("do", q_len))
        }
        problems["backward"].append(Problem.create(tensors, Options(causal=True), "backward"))
        del tensors["do"]
        problems["forward"].append(Problem.create(tensors, Options(causal=True, return_lse=True)))
    grouped = {}
    for direction, each in problems.items():
        for problem in each:
            for t in problem.outputs.values():
                t.fill_(float("nan"))
        run(each, "triton")
        grouped[direction] = [{name: t.clone() for name, t in problem.outputs.items()} for problem in each]
        for problem, answer in zip(each, grouped[direction], strict=True):
            run([problem], "triton")
            assert all(torch.equal(problem.outputs[name], t) for name, t in answer.items())
            assert not any(t.isnan().any() for t in answer.values())
    assert grouped["forward"][2]["o"].abs().max() == 0
    assert (grouped["forward"][2]["lse"] == float("-inf")).all()
    assert grouped["backward"][2]["dq"].abs().max() == 0
