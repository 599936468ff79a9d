"""`torch.jit.script` of modules that call `scaled_dot_product_attention`: the same answers, also after saving."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashpoint_kernels
from flashpoint_kernels import scaled_dot_product_attention
from tests.support.kernels.solving import normal

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashpoint_kernels.scaled_dot_product_attention(q, k, v)


class WithOptions(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return flashpoint_kernels.scaled_dot_product_attention(
            q, k, v, attn_mask, scale=0.3, is_causal=True, enable_gqa=True
        )


class Dropped(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = flashpoint_kernels.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        return first - flashpoint_kernels.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


class WithDropout(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return flashpoint_kernels.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)


def reloaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def inputs(*, kv_heads: int = 4) -> list[Tensor]:
    shapes = (2, 4, 5, 16), (2, kv_heads, 7, 16), (2, kv_heads, 7, 16)
    return [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("module", [Plain(), WithOptions()])
def test_answers_and_gradients_have_the_same_bits(module: nn.Module, saved: bool) -> None:
    leaves = inputs(kv_heads=2 if isinstance(module, WithOptions) else 4)
    given = [*leaves, *([normal(5, 7, seed=9).requires_grad_()] if isinstance(module, WithOptions) else [])]
    program = torch.jit.script(module)
    program = reloaded(program) if saved else program
    for _ in range(3):  # TorchScript optimizes a program after its first calls
        answers = program(*given), module(*given)
        grads = [torch.autograd.grad(o.square().sum(), given) for o in answers]
        assert torch.equal(*answers)
        assert all(map(torch.equal, *grads))


def test_encoder_layers_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True
    )  # training, so without torch's fast path
    x = normal(2, 6, 16)
    expected = layer(x)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    program = torch.jit.script(layer)
    assert "flashpoint::scaled_dot_product_attention" in str(program.inlined_graph)
    torch.testing.assert_close(program(x), expected)
    torch.testing.assert_close(reloaded(program)(x), expected)


def test_each_call_drops_other_weights() -> None:
    program = torch.jit.script(Dropped())
    for _ in range(3):
        assert program(*inputs()).any()


def test_what_is_wrong_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="dropout_p: must be 0 to 1, not -1"):
        torch.jit.script(WithDropout())(q, k, v, -1.0)
