"""Inputs at the limits of floating point and autograd, such as masks of huge numbers and second derivatives."""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch

from flashpoint_kernels import Options, Problem, ProblemError, attention, run, verify
from tests.conftest import DEVICE, FUSED

BACKENDS = ["triton", FUSED, "tiled", "reference"]


def inputs(q_len: int = 6, kv_len: int = 9, dim: int = 8, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    lengths = {"q": q_len, "k": kv_len, "v": kv_len, "do": q_len}
    made = {name: torch.randn((1, 2, n, dim), generator=g).to(DEVICE) for name, n in lengths.items()}
    return {**made, **more}


@pytest.mark.parametrize(
    ("backend", "count"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case == ("triton", 2) else [])
        for case in product(BACKENDS, (1, 2))
    ],
)
def test_every_choice_of_gradients(backend: str, count: int) -> None:
    everything = ("dq", "dk", "dv") if backend == FUSED else ("dq", "dk", "dv", "dattn_mask", "dsinks")
    t = inputs()
    if backend != FUSED:
        t |= {"attn_mask": torch.zeros(6, 9, device=DEVICE), "sinks": torch.zeros(2, device=DEVICE)}
    whole = Problem.create(t, Options(grads=everything), "backward")
    run([whole], backend)
    for grads in combinations(everything, count):
        part = Problem.create(t, Options(grads=grads), "backward")
        run([part], backend)
        assert list(part.outputs) == list(grads)
        assert all(torch.equal(part.outputs[name], whole.outputs[name]) for name in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", ["triton", *(["cpu"] if DEVICE == "cpu" else []), "tiled"])
def test_a_mask_of_the_least_number_is_added_and_not_minus_infinity(backend: str, dtype: torch.dtype) -> None:
    """The lowest finite number in a mask, as models use it for padding, is added to scores, not taken for −∞.

    A row of only this number absorbs its scores, and gives the mean of the values.
    """
    mask = torch.zeros(6, 9, dtype=dtype, device=DEVICE)
    mask[:3, 4:], mask[4] = torch.finfo(dtype).min, torch.finfo(dtype).min
    t = inputs(attn_mask=mask)
    forward = {name: tensor for name, tensor in t.items() if name != "do"}
    problem = Problem.create(forward, Options(return_lse=True))
    run([problem], backend)
    mean = t["v"].mean(2)
    torch.testing.assert_close(problem.outputs["o"][:, :, 4], mean, rtol=0, atol=1e-5)
    assert problem.outputs["lse"].isfinite().all()
    visible = torch.softmax(t["q"][:, :, :3] @ t["k"][:, :, :4].transpose(-1, -2) / 8**0.5, -1) @ t["v"][:, :, :4]
    torch.testing.assert_close(problem.outputs["o"][:, :, :3], visible, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_scores_give_finite_gradients(backend: str) -> None:
    problem = Problem.create(inputs(), Options(scale=1e8), "backward")
    run([problem], backend)
    assert all(t.isfinite().all() for t in problem.outputs.values())


@pytest.mark.parametrize("backend", ["triton", "tiled", "reference"])
def test_a_row_that_sees_nothing_has_no_gradient_whatever_comes_back_through_lse(backend: str) -> None:
    mask = torch.ones(6, 9, dtype=torch.bool, device=DEVICE)
    mask[2] = False
    dlse = torch.zeros(1, 2, 6, device=DEVICE)
    dlse[:, :, 2] = float("inf")
    problem = Problem.create(inputs(attn_mask=mask, dlse=dlse), Options(), "backward")
    run([problem], backend)
    assert all(t.isfinite().all() for t in problem.outputs.values())
    assert not problem.outputs["dq"][:, :, 2].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 1e39), ("scale", 10**400), ("softcap", 1e39), ("softcap", 1e-46), ("softcap", 10**400), ("scale", True)],
)
def test_what_float32_does_not_hold_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ProblemError) as caught:
        Options(**{name: value})
    assert [field for field, _ in caught.value.errors] == [name]


def test_numpys_numbers_are_numbers() -> None:
    t = inputs()
    actual = attention(t["q"], t["k"], t["v"], scale=np.float32(0.5), window=(np.int64(2), np.int32(1)))  # type: ignore[arg-type]
    torch.testing.assert_close(actual, attention(t["q"], t["k"], t["v"], scale=0.5, window=(2, 1)))


def test_a_large_head_dimension_of_the_values_alone_is_judged() -> None:
    assert verify(inputs(), Options(grads=("dv",))).ok


FEW = ((True, -0.3, (17, 8)), (False, 0.0, (8, 17)))
SCALED = product(BACKENDS, (False, True), (-0.3, 0.0), ((17, 17), (17, 8), (8, 17)))


@pytest.mark.parametrize(
    ("backend", "masked", "scale", "lengths"),
    [
        # The fast tests run each scale once with the interpreted kernels.
        pytest.param(*case, marks=[pytest.mark.slow] if case[0] == "triton" and case[1:] not in FEW else [])
        for case in SCALED
    ],
)
def test_a_scale_may_be_negative_or_zero(backend: str, masked: bool, scale: float, lengths: tuple[int, int]) -> None:
    """The score of a hidden key is −∞ for every scale: the scale must not multiply it."""
    q_len, kv_len = lengths
    t = inputs(q_len, kv_len, 16) | ({"attn_mask": torch.randn(q_len, kv_len).to(DEVICE)} if masked else {})
    for alignment in ("top_left", "bottom_right"):
        report = verify(t, Options(backend=backend, scale=scale, causal=True, causal_alignment=alignment))
        assert report.ok, "\n".join(str(e) for e in report.tensors if not e.ok)
