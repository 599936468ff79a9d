"""o has the dimension order of q in memory, and a gradient that of its input; this order does not change the bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import attention, attention_backward, available_backends
from tests.conftest import DEVICE
from tests.support.covering import cover
from tests.support.kernels.solving import normal

BACKENDS = [name for name in ("triton", "cpu", "tiled", "reference") if name in available_backends(DEVICE)]


def laid(t: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `t` in memory with this order of dimensions, from the largest stride."""
    back = [order.index(dim) for dim in range(t.ndim)]
    return t.permute(order).contiguous().permute(back)


def dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of this shape with this order of dimensions in memory."""
    return laid(torch.empty(shape), order).stride()


ORDERS = {
    "bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "hbsd": (1, 0, 2, 3),
    "bhds": (0, 1, 3, 2), "dshb": (3, 2, 1, 0),  # columns are not innermost
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 3.0}, "lengths": {"kv_lengths": [3, 7, 0]}}


@cover(backend=BACKENDS, order=ORDERS, options=OPTIONS)
def test_answers_lie_as_their_inputs_with_the_same_bits(
    backend: str, order: tuple[int, ...], options: dict[str, Any]
) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    q, k, v = (normal(3, 4, n, d, seed=s).to(dtype) for s, (n, d) in enumerate(((6, 8), (7, 8), (7, 16))))
    kinds = {"contiguous": [q, k, v], "laid": [laid(t, order) for t in (q, k, v)]}
    answers: dict[str, list[Tensor]] = {}
    for kind, given in kinds.items():
        leaves = [t.detach().requires_grad_() for t in given]
        o, lse = attention(*leaves, return_lse=True, backend=backend, **options)
        do = normal(*o.shape, seed=9).to(dtype)
        grads = torch.autograd.grad(o, leaves, do, retain_graph=True)
        again = attention_backward(do, *leaves, o.detach(), lse.detach(), backend=backend, **options)
        unrecorded = attention(*given, backend=backend, **options)
        answers[kind] = [o.detach(), *grads, *again, unrecorded]
        layout = order if kind == "laid" else (0, 1, 2, 3)
        for t in answers[kind]:
            assert t.stride() == dense(tuple(t.shape), layout)
    for one, other in zip(*answers.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_joins_its_heads_without_a_copy(backend: str) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    heads = normal(2, 5, 3 * 4 * 8).to(dtype).unflatten(-1, (3, 4, 8))  # as from one projection
    q, k, v = (t.transpose(1, 2) for t in heads.unbind(2))
    o = attention(q, k, v, backend=backend)
    joined = o.transpose(1, 2).reshape(2, 5, 32)
    assert joined.data_ptr() == o.data_ptr()
    assert joined.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_inputs_have_contiguous_answers(backend: str) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    q = normal(1, 1, 5, 8).to(dtype).expand(2, 3, 5, 8)
    k = normal(2, 1, 7, 8).to(dtype)
    assert attention(q, k, k, backend=backend).is_contiguous()
    grads = attention_backward(
        normal(2, 3, 5, 8).to(dtype), q, k.expand(2, 3, 7, 8), k.expand(2, 3, 7, 8), backend=backend
    )
    assert all(t.is_contiguous() for t in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_and_the_gradient_of_a_mask(backend: str) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    q, k = laid(normal(7, 4, 8), (1, 0, 2)).to(dtype), laid(normal(9, 4, 8, seed=1), (1, 0, 2)).to(dtype)
    cu = {"cu_seqlens_q": [0, 3, 7], "cu_seqlens_k": [0, 4, 9]}
    o = attention(q, k, k, layout="thd", backend=backend, **cu)
    assert o.stride() == dense((7, 4, 8), (1, 0, 2))
    assert torch.equal(
        o, attention(q.contiguous(), k.contiguous(), k.contiguous(), layout="thd", backend=backend, **cu)
    )

    q, k, mask = normal(2, 3, 5, 8).to(dtype), normal(2, 3, 7, 8).to(dtype), normal(2, 3, 5, 7, seed=3).to(dtype)
    results = []
    for given in (mask, laid(mask, (1, 0, 2, 3))):
        leaf = given.detach().requires_grad_()
        attention(q, k, k, attn_mask=leaf, backend=backend).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.stride() == given.stride()
        results.append(leaf.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_program_knows_the_strides(dynamic: bool) -> None:
    def step(q: Tensor, k: Tensor) -> Tensor:
        return attention(q, k, k, softcap=2.0).transpose(1, 2).reshape(*q.shape[:1], -1) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        q = normal(2, rows, 4, 8).transpose(1, 2).requires_grad_()
        k = normal(2, 4, 7, 8).requires_grad_()
        assert torch.equal(compiled(q, k), step(q, k))
        compiled(q, k).sum().backward()
