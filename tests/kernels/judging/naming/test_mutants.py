"""Without a mistake, `mutants.answers` equals the reference; with a mistake, only the answers that it names change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.naming.mutants import Mistake, answers, rounded_to
from flashpoint_kernels.judging.values import draw
from tests.support.kernels.solving import backward, forward, normal

SIZES: dict[str, Any] = {
    "batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 9, "kv_len": 14, "head_dim": 16, "value_dim": 24,
}  # fmt: skip
CASES = [
    {},
    {"causal": True},
    {"causal": True, "q_len": 20},  # with more queries than keys, bottom-right alignment hides all keys from some rows
    {"window": (3, 2), "scale": 0.3},
    {"softcap": 2.0, "mask": "bool"},
    {"mask": "float", "extras": ("alibi_slopes",)},
    {"extras": ("sinks",), "causal": True},
    {"extras": ("kv_lengths", "alibi_slopes"), "window": (5, -1)},
]


def exact(case: Case, t: dict[str, Tensor], top_left: bool) -> dict[str, Tensor]:
    """Return the answers of the reference backend in float64. It does not use torch's attention kernels."""
    options: dict[str, Any] = {
        "causal": case.causal, "window": case.window, "softcap": case.softcap, "scale": case.scale,
        "causal_alignment": "top_left" if top_left else "bottom_right",
    }  # fmt: skip
    wide = {name: x.double() if x.is_floating_point() and name != "alibi_slopes" else x for name, x in t.items()}
    return forward("reference", wide, **options) | backward("reference", wide, **options)


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("backward_formula", [False, True])
def test_without_a_change_the_answers_are_right(fields: dict[str, Any], top_left: bool, backward_formula: bool) -> None:
    """Without a mistake, the answers are right, with gradients from autograd or from the backward's formula."""
    case = Case(**(SIZES | fields))
    t = draw(case)
    none = Mistake("none", "", "", backward={"dq": 1.0} if backward_formula else {})
    actual = answers(none, t, case, top_left, gradients=True)
    assert actual.keys() == ({"dq", "dk", "dv"} if backward_formula else {"o", "lse", "dq", "dk", "dv"})
    expected = exact(case, t, top_left)
    for name, x in actual.items():
        if name.startswith("d") and not backward_formula and expected["lse"].isinf().any():
            continue  # autograd divides 0 by 0 in rows that see no key
        tolerance = 1e-5 if name == "lse" else 1e-10  # lse is float32
        torch.testing.assert_close(x, expected[name].double(), rtol=tolerance, atol=tolerance)


def test_a_mistake_of_the_backward_changes_what_it_names() -> None:
    case = Case(**SIZES)
    t = draw(case)
    right = answers(Mistake("none", "", "", backward={"dq": 1.0}), t, case, False, gradients=True)
    for name in right:
        changed = answers(Mistake("twice", "", "", backward={name: 2.0}), t, case, False, gradients=True)
        for other, x in changed.items():
            assert torch.equal(x, right[other] * (2.0 if other == name else 1.0))


@pytest.mark.parametrize(("kind", "bits"), [("bf16", 8), ("fp16", 11), ("tf32", 11), ("fp8", 4)])
def test_rounding_keeps_some_bits_and_the_gradient_of_no_rounding(kind: str, bits: int) -> None:
    x = normal(1000, seed=3).double().cpu().clamp(-4, 4).add(torch.tensor(5.0)).requires_grad_()
    rounded = rounded_to(x, kind)
    assert ((rounded - x) / x).abs().max() <= 2.0**-bits
    assert ((rounded - x) / x).abs().max() > 2.0 ** -(bits + 2)
    (grad,) = torch.autograd.grad(rounded.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))
    assert rounded_to(x, "none") is x
