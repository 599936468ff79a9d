"""The forward for Hopper has the same bits on any number of multiprocessors, with one or two sets of descriptors."""

import random
from dataclasses import replace

import pytest
import torch

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.host.launch import forward_calls
from tests.conftest import DEVICE
from tests.support.kernels.hopper import ON_SM_90, TILES

pytestmark = ON_SM_90


@pytest.mark.usefixtures("hopper_path")
@pytest.mark.parametrize("multiprocessors", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 1000))])
def test_bits_do_not_depend_on_how_many_programs_share_out_the_blocks(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of multiprocessors gives the same bits, also if some blocks see no key or each block has a program."""
    g = torch.Generator().manual_seed(5)

    def problem(heads: int, q_len: int, kv_len: int) -> Problem:
        lengths = {"q": q_len, "k": kv_len, "v": kv_len}
        tensors = {name: torch.randn((1, heads, n, 16), generator=g).half().to(DEVICE) for name, n in lengths.items()}
        return Problem.create(tensors, Options(causal=True, return_lse=True))

    problems = [problem(1, 150, 70), problem(3, 70, 130), problem(2, TILES.few_queries + 32, 0)]
    run(problems, "triton")
    expected = [{name: t.clone() for name, t in each.outputs.items()} for each in problems]
    chip = config.chip_of(torch.device(DEVICE))
    monkeypatch.setattr(config, "stand_in", replace(chip, multiprocessors=multiprocessors))
    blocks = sum(call.programs for call in forward_calls(problems))
    assert blocks == multiprocessors if multiprocessors < 1000 else 3 < blocks < 1000
    for each in problems:
        for t in each.outputs.values():
            t.fill_(float("nan"))
    run(problems, "triton")
    for each, answer in zip(problems, expected, strict=True):
        assert all(torch.equal(each.outputs[name], t) for name, t in answer.items())


@pytest.mark.usefixtures("hopper_path")
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 21))])
def test_two_sets_of_descriptors_change_no_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that take blocks of 0 to 5 tiles of keys in any order. The interpreter finds a descriptor that changes
    during a copy.
    """
    drawn = random.Random(seed)
    monkeypatch.setattr(
        config, "stand_in", replace(config.chip_of(torch.device(DEVICE)), multiprocessors=drawn.choice([1, 2, 3]))
    )
    g = torch.Generator().manual_seed(seed)
    problems = []
    for _ in range(3):
        heads, q_len, kv_len = drawn.choice([1, 2]), drawn.randint(65, 200), drawn.choice([0, 1, 33, 64, 97, 150])
        lengths = {"q": q_len, "k": kv_len, "v": kv_len}
        tensors = {name: torch.randn((1, heads, n, 16), generator=g).half().to(DEVICE) for name, n in lengths.items()}
        problems.append(Problem.create(tensors, Options(causal=drawn.random() < 0.5, return_lse=True)))
    answers = []
    for switch in ("0", "1"):
        monkeypatch.setenv("FLASHPOINT_TWO_SETS", switch)
        calls = [call for call in forward_calls(problems) if call.programs]
        assert [(call.kernel.__name__, call.constants.TWO_SETS) for call in calls] == [
            ("attention_forward_hopper", switch == "1")
        ]
        for each in problems:
            for t in each.outputs.values():
                t.fill_(float("nan"))
        run(problems, "triton")
        answers.append([{name: t.clone() for name, t in each.outputs.items()} for each in problems])
    for one, two in zip(*answers, strict=True):
        for name, t in one.items():
            assert not t.isnan().any()
            assert torch.equal(t, two[name])
