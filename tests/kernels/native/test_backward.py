"""The gradient in C is exact for each option, instruction set and dtype."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import Options, Problem, run
from tests.support.kernels.problems import Sizes, problems
from tests.support.kernels.solving import backward, check, forward, normal, qkv

GRADS = ("dq", "dk", "dv")


SIZES = Sizes(
    q_len=st.sampled_from([1, 2, 63, 64, 130, 257]), kv_len=st.sampled_from([1, 5, 127, 128, 200, 385]),
    dim=st.sampled_from([1, 8, 16, 40, 64, 111, 256]), value_dim=st.sampled_from([16, 24, 64, 100]),
)  # fmt: skip


@pytest.mark.slow
@given(problem=problems(SIZES, backward=True))
@settings(max_examples=120, deadline=None)
def test_any_problem_agrees_with_float64(problem: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, options = problem
    check("cpu", tensors, **options)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float32, torch.float16))]
)
def test_each_instruction_set_is_exact(level: str, dtype: torch.dtype) -> None:
    for dim, value_dim in ((64, 64), (40, 24), (128, 112)):
        t = qkv(2, 4, 130, 200, dim, kv_heads=2, value_dim=value_dim, dtype=dtype)
        check("cpu", t | {"alibi_slopes": normal(4).abs() / 64}, causal=True, window=(70, -1))
        check("cpu", t | {"sinks": normal(4)}, softcap=4.0, dropout_p=0.2, dropout_seed=3, grads=[*GRADS, "dsinks"])
        mask = normal(2, 4, 130, 200, dtype=dtype)
        check("cpu", t | {"attn_mask": mask}, causal=True, grads=["dattn_mask"])


def test_an_lse_of_other_numbers_gives_infinities_rather_than_garbage() -> None:
    t = qkv(1, 1, 3, 5, 16)
    t |= {"o": torch.zeros(1, 1, 3, 16), "lse": torch.full((1, 1, 3), -1000.0)}
    problem = Problem.create(t, Options(backend="cpu"), "backward")
    run([problem], "cpu")
    assert not problem.outputs["dv"].isfinite().any()


def test_keys_that_no_query_sees_are_not_read() -> None:
    t = qkv(1, 2, 64, 700, 32)
    t |= forward("cpu", t, causal=True, window=(100, 0))
    expected = backward("cpu", t, causal=True, window=(100, 0))
    for name in "kv":
        t[name][:, :, :400] = torch.nan
    actual = backward("cpu", t, causal=True, window=(100, 0))
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())
    assert not actual["dk"][:, :, :400].any()
