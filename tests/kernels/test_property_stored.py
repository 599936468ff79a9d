"""Gradients that store dS agree with float64 for any lengths, with the same bits in any chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashpoint_kernels import Options, Problem, verify
from tests.support.kernels.hopper import ON_SM_90, answers, assert_equal
from tests.support.kernels.solving import normal, qkv

FOR_HOPPER = pytest.mark.usefixtures("stores_ds")
IN_GENERAL = pytest.mark.usefixtures("stores_ds_in_general")


@st.composite
def drawn(draw: st.DrawFn) -> tuple[dict[str, Tensor], Options]:
    """Draw a problem whose dS may be stored: ragged or not, with sequences of any length, 0 included."""
    dims = st.sampled_from([16, 24, 64, 128, 136])
    heads, group, seed = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 2**20))
    lengths = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=2))
    q_len, kv_len = (max(each) for each in zip(*lengths, strict=True))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]))
    layout = draw(st.sampled_from(["thd", "bhsd", "bshd"]))
    q, k = torch.tensor(lengths).T
    ragged = layout == "thd"
    sizes = (1, int(q.sum()), int(k.sum())) if ragged else (len(lengths), q_len, kv_len)
    tensors = qkv(
        sizes[0], heads * group, *sizes[1:], draw(dims), kv_heads=heads, value_dim=draw(dims), dtype=dtype, seed=seed
    )
    if layout != "bhsd":
        tensors = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items()}
    if ragged:
        tensors = {name: t[0] for name, t in tensors.items()}
        tensors |= {f"cu_seqlens_{name}": torch.cat([n.new_zeros(1), n.cumsum(0)]) for name, n in (("q", q), ("k", k))}
    elif draw(st.booleans()):
        tensors |= {"q_lengths": q, "kv_lengths": k}
    if draw(st.booleans()):
        tensors["dlse"] = normal(*tensors["q"].shape[:-1], seed=seed)
        tensors["dlse"] = tensors["dlse"].transpose(-1, -2).contiguous() if layout != "bhsd" else tensors["dlse"]
    alignment = draw(st.sampled_from(["bottom_right", "top_left"]))
    return tensors, Options(layout=layout, causal=draw(st.booleans()), causal_alignment=alignment, backend="triton")


def check_any(drawn_problem: tuple[dict[str, Tensor], Options]) -> None:
    tensors, options = drawn_problem
    report = verify(tensors, options)
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)
    problem = Problem.create(tensors, options, "backward")
    assert_equal(answers([problem], workspace=1)[0], answers([problem])[0])


@ON_SM_90
@FOR_HOPPER
@pytest.mark.slow
@given(problem=drawn())
@settings(max_examples=4, deadline=None)
def test_any_problem_is_right_with_the_same_bits_in_the_smallest_chunks(
    problem: tuple[dict[str, Tensor], Options],
) -> None:
    check_any(problem)


@ON_SM_90
@FOR_HOPPER
@pytest.mark.full
@given(problem=drawn())
@settings(max_examples=150, deadline=None)
def test_any_of_more_problems(problem: tuple[dict[str, Tensor], Options]) -> None:
    check_any(problem)


@IN_GENERAL
@pytest.mark.slow
@given(problem=drawn())
@settings(max_examples=4, deadline=None)
def test_any_problem_is_right_by_the_general_kernels(problem: tuple[dict[str, Tensor], Options]) -> None:
    check_any(problem)


@IN_GENERAL
@pytest.mark.full
@given(problem=drawn())
@settings(max_examples=150, deadline=None)
def test_any_of_more_problems_by_the_general_kernels(problem: tuple[dict[str, Tensor], Options]) -> None:
    check_any(problem)
