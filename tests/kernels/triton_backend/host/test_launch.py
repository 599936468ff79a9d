"""One copy to the device has all tables and lists of a launch; a prepared launch runs again with other numbers."""

import torch

from flashpoint_kernels import Options, Problem, run, triton_backend
from flashpoint_kernels.triton_backend.host.config import config_for
from flashpoint_kernels.triton_backend.host.launch import backward_calls, forward_calls
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal, qkv


def problems_of(direction: str) -> list[Problem]:
    """Return two problems: one of few queries with keys in parts, and one of many queries."""
    problems = []
    tiles = config_for(torch.device(DEVICE), "float32", 16, 16, 0)
    for q_len, kv_len in ((2, 2 * tiles.split_keys + 22), (tiles.few_queries + 32, 50)):
        t = qkv(1, 4, q_len, kv_len, 16, kv_heads=2)
        forward = Problem.create({name: t[name] for name in "qkv"}, Options(causal=True, return_lse=True))
        if direction == "backward":
            run([forward], "triton")
            forward = Problem.create(t | forward.outputs, Options(causal=True), "backward")
        problems.append(forward)
    return problems


def test_what_kernels_read_is_copied_at_once() -> None:
    for calls in (
        [*forward_calls(problems_of("forward"))],
        [*backward_calls(problems_of("backward"), [{}, {}])],
    ):
        ran = [call for call in calls if call.programs]
        assert len(ran) > 2
        read = {t.untyped_storage().data_ptr() for call in ran for t in call.args() if torch.is_tensor(t)
                if not t.dtype.is_floating_point}  # fmt: skip
        assert len(read) == 1
        again = {t.data_ptr() for call in ran for t in call.args() if torch.is_tensor(t)}
        assert again == {t.data_ptr() for call in ran for t in call.args() if torch.is_tensor(t)}


def test_a_prepared_launch_runs_again_with_other_numbers() -> None:
    for direction in ("forward", "backward"):
        problems = problems_of(direction)
        launch = triton_backend.prepare(problems)
        launch()
        for seed, problem in enumerate(problems):
            problem.tensors["q"].copy_(normal(*problem.tensors["q"].shape, seed=50 + seed))
        launch()
        again = [{name: t.clone() for name, t in problem.outputs.items()} for problem in problems]
        for problem in problems:
            for t in problem.outputs.values():
                t.fill_(float("nan"))
        run(problems, "triton")
        for actual, problem in zip(again, problems, strict=True):
            assert all(torch.equal(actual[name], t) for name, t in problem.outputs.items())
