"""Tensors whose elements are not in their memory: freed storage, zero tensors of autograd, and the negative bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import Options, Problem, ProblemError, attention, attention_backward, native, run
from tests.support.kernels.solving import normal, qkv

OPTIONS: list[dict[str, object]] = [{}, {"softcap": 5.0, "causal": True}, {"backend": "tiled"}, {"layout": "bshd"}]


def freed(t: Tensor) -> Tensor:
    """Return a tensor of this shape whose storage was freed; its address is not 0, because it is a view."""
    both = torch.stack([t, t])
    view = both[1]
    both.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "attn_mask"])
def test_a_freed_storage_is_refused_by_name(name: str, options: dict[str, object]) -> None:
    t = qkv(1, 5, 5, 5, 8)
    if name == "attn_mask":
        t["attn_mask"] = normal(5, 5)
    attention(**{n: x for n, x in t.items() if n != "do"}, **options)  # type: ignore[arg-type]  # its route is cached
    t[name] = freed(t[name])
    with pytest.raises(ProblemError, match=f"{name}: has no memory"):
        attention_backward(**t, **options)  # type: ignore[arg-type]
    if name != "do":
        with pytest.raises(ProblemError, match=f"{name}: has no memory"):
            attention(**{n: x for n, x in t.items() if n != "do"}, **options)  # type: ignore[arg-type]


def test_a_parameter_freed_between_the_passes_is_refused() -> None:
    t = qkv(1, 5, 5, 5, 8)
    k = t["k"].clone().requires_grad_()
    o = attention(t["q"], k, t["v"])
    k.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match="k: has no memory"):
        o.backward(t["do"])


@pytest.mark.skipif(native.library() is None, reason="without the kernels in C")
def test_the_kernels_in_c_refuse_a_missing_address() -> None:
    t = qkv(1, 5, 5, 5, 8)
    problem = Problem.create({n: t[n] for n in "qkv"}, Options(softcap=1.0))
    problem.tensors["k"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        run([problem], "cpu")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lazy", [torch._neg_view, lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype)])
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "attn_mask"])
def test_lazy_tensors_count_with_their_values(
    name: str, lazy: Callable[[Tensor], Tensor], options: dict[str, object]
) -> None:
    given = qkv(1, 5, 5, 5, 8)
    if name == "attn_mask":
        given["attn_mask"] = normal(5, 5)
    given[name] = lazy(given[name])
    plain = given | {name: given[name] + 0}
    assert torch.equal(plain[name], given[name])
    answers = []
    for t in (given, plain):
        inputs = {n: x.detach().requires_grad_(n in "qkv") for n, x in t.items() if n != "do"}
        o = attention(**inputs, **options)  # type: ignore[arg-type]
        o.backward(t["do"])
        gradients = attention_backward(**t, **options)  # type: ignore[arg-type]
        answers.append([o, *(inputs[n].grad for n in "qkv"), *gradients])
    for x, y in zip(*answers, strict=True):
        assert torch.equal(x, y)
