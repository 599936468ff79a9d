"""The judge recognises and names the known mistake that made an answer wrong."""

import math

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
import torch

from flashpoint_contract.options import Options
from flashpoint_kernels import attention
from tests.judge.small import causes, tensors


def test_lse_in_base_two_is_recognised():
    problem = tensors()
    _, lse = attention(**problem, return_lse=True)
    assert causes(problem, Options(), lse=lse / math.log(2)) == "lse-base-2: lse is in base 2"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("requested", "applied", "message"),
    [
        ({"causal": True}, {"window": (-1, 1)}, "shifted by one: a query sees one key too many"),
        ({"causal": True}, {}, "the causal mask is missing"),
        ({}, {"causal": True}, "a causal mask is used, but not requested"),
        ({"causal": True}, {"causal": True, "causal_alignment": "top_left"}, "aligned to the other corner"),
        ({}, {"scale": 1.0}, "the scale is missing"),
        ({}, {"scale": 1 / 16}, "scale"),
        ({"scale": 0.7}, {"scale": 0.49}, "twice"),
        ({"scale": 0.7}, {}, "scale"),
        ({"softcap": 0.5}, {}, "the softcap is ignored"),
        ({"window": (4, 0)}, {"window": (5, 0)}, "window"),
        ({"window": (4, 0)}, {"window": (3, 0)}, "window"),
        ({"window": (4, 0)}, {"window": (-1, 0)}, "window"),
    ],
)
def test_an_option_that_was_mistaken_is_recognised(requested, applied, message, dtype):
    problem = tensors(dtype=dtype)
    assert message in causes(problem, Options(**requested), o=attention(**problem, **applied))


def test_a_query_that_does_not_see_its_own_key_is_recognised():
    problem = tensors()
    seen = torch.ones(20, 28, dtype=torch.bool).tril(7)
    texts = causes(problem, Options(causal=True), o=attention(**problem, attn_mask=seen))
    assert "a query does not see its own key" in texts


def test_heads_in_another_order_are_recognised():
    problem = tensors()
    right = attention(**problem)
    transposed = right.transpose(1, 2).contiguous().view(right.shape)
    assert "heads and rows are transposed in memory" in causes(problem, Options(), o=transposed)
    reordered = {**problem, **{name: problem[name][:, [0, 1, 0, 1]] for name in "kv"}}
    assert "h % " in causes(problem, Options(), o=attention(**reordered))


def test_what_was_done_to_a_mask_is_recognised():
    problem = tensors()
    mask = torch.rand(20, 28) < 0.6
    masked = problem | {"attn_mask": mask}
    assert "inverted" in causes(masked, Options(), o=attention(**problem, attn_mask=~mask))
    assert "attn_mask is ignored" in causes(masked, Options(), o=attention(**problem))
    slopes = problem | {"alibi_slopes": torch.rand(4)}
    negated = attention(**problem, alibi_slopes=-slopes["alibi_slopes"])
    assert "is added" in causes(slopes, Options(), o=negated)
    lengths = problem | {"kv_lengths": torch.tensor([28, 11])}
    assert causes(lengths, Options(), o=attention(**problem)) == "input-ignored: kv_lengths is ignored"


def test_a_gradient_without_its_scale_is_recognised_and_noise_is_not():
    problem = tensors()
    q = problem["q"].requires_grad_()
    do = torch.randn(2, 4, 20, 16)
    (dq,) = torch.autograd.grad(attention(**problem, scale=0.25), q, do)
    problem = {name: t.detach() for name, t in problem.items()} | {"do": do}
    assert "the scale is missing in dq" in causes(problem, Options(scale=0.25), dq=4 * dq)
    assert causes(problem, Options(), dq=torch.randn_like(dq)) == ""
