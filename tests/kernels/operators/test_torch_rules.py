"""`attention` refuses NestedTensors and gradients of pages, and follows SDPA under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashpoint_kernels import ProblemError, attention, quantize
from flashpoint_kernels.modules import Block
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

X = normal(1, 2, 6, 8)


def leaf(t: Tensor = X) -> Tensor:
    return t.detach().clone().requires_grad_()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_what_to_do(layout: torch.layout) -> None:
    parts = [normal(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    with pytest.raises(ProblemError, match=r"q: is a NestedTensor: .* layout='thd'"):
        attention(nested, nested, nested)


def test_pages_and_8_bits_have_a_forward_and_no_backward() -> None:
    k, k_scale = quantize(X, torch.int8)
    table = torch.tensor([[0]], dtype=torch.int32, device=DEVICE)
    of_pages = {"block_table": table, "kv_lengths": torch.tensor([6])}
    for k_, more, name in (
        (k, {"k_scale": k_scale, "v_scale": k_scale}, "k_scale"),
        (X, of_pages, "block_table"),
    ):
        q = leaf()
        o = attention(q, k_, k_, **more)
        assert torch.equal(o, attention(X, k_, k_, **more))
        with pytest.raises(ProblemError, match=f"{name}: is only for the forward: pages and 8-bit keys"):
            o.sum().backward()


KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "kinds", [(q, k, v) for q in KINDS[:2] for k in KINDS[:3] for v in KINDS[:2]] + [(torch.float64,) * 3], ids=str
)
def test_autocast_does_as_for_sdpa(kinds: tuple[torch.dtype, ...]) -> None:
    """Under autocast o has SDPA's dtype and values, and each gradient has SDPA's dtype."""

    def inputs() -> list[Tensor]:
        return [leaf(normal(1, 2, 6, 8, seed=n).to(kind)) for n, kind in enumerate(kinds)]

    results = []
    for call in (attention, sdpa):
        with torch.autocast(DEVICE):
            o = call(*(given := inputs()))
            with torch.autocast(DEVICE, dtype=torch.float16):
                inner = call(*inputs()).dtype
            with torch.autocast(DEVICE, enabled=False):
                if len(set(kinds)) == 1:
                    assert call(*inputs()).dtype == kinds[0]
                else:
                    with pytest.raises((RuntimeError, ValueError), match="dtype"):
                        call(*inputs())
        o.sum().backward()
        results.append((o, inner, [t.grad for t in given]))
    (o, inner, grads), (expected, expected_inner, expected_grads) = results
    assert (o.dtype, inner) == (expected.dtype, expected_inner)
    torch.testing.assert_close(o, expected, rtol=2**-6, atol=2**-6)
    for grad, exact in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, exact, rtol=2**-5, atol=2**-5)  # also checks the dtype


def test_autocast_of_what_is_not_q_k_and_v() -> None:
    """Autocast keeps the dtype of 8-bit keys, masks and sinks; lse is float32."""
    k, k_scale = quantize(X, torch.int8)
    with torch.autocast(DEVICE):
        o, lse = attention(X, k, k, k_scale=k_scale, v_scale=k_scale, return_lse=True)
        masked = attention(X, X, X, attn_mask=normal(6, 6), sinks=normal(2))
        other = attention(*(X.to("meta"),) * 3)
    half = torch.get_autocast_dtype(DEVICE)
    assert (o.dtype, lse.dtype, masked.dtype, other.dtype) == (half, torch.float32, half, torch.float32)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_compiles(inside: bool) -> None:
    torch.compiler.reset()

    def call(*inputs: Tensor) -> Tensor:
        if not inside:
            return attention(*inputs, causal=True)
        with torch.autocast(DEVICE):
            return attention(*inputs, causal=True)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        q = leaf()
        with torch.autocast(DEVICE, enabled=not inside):
            o = function(q, X, X.bfloat16())
        results.append((o, *torch.autograd.grad(o.float().sum(), q)))
    for eager, compiled in zip(*results, strict=True):
        assert eager.dtype == compiled.dtype
        assert torch.equal(eager, compiled)


def test_a_module_trains_under_autocast() -> None:
    block, x = Block(16, heads=2).to(DEVICE), leaf(normal(1, 5, 16))
    with torch.autocast(DEVICE):
        block(x).sum().backward()
    assert {p.grad.dtype for p in block.parameters() if p.grad is not None} == {torch.float32}
