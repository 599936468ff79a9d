"""`FlashAttention` and `Block` equal the same modules written in plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from flashpoint_kernels import attention
from flashpoint_kernels.modules import Block, FlashAttention
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

HEADS = [(4, 4), (4, 2), (4, 1)]


def module(kind: type[FlashAttention] | type[Block], *sizes: int, **how: Any) -> Any:
    torch.manual_seed(0)
    return kind(*sizes, **how).to(DEVICE)


def written_out(block: FlashAttention, x: Tensor) -> Tensor:
    q, k, v = linear(x, block.qkv.weight, block.qkv.bias).split([32, 8 * block.kv_heads, 8 * block.kv_heads], -1)
    q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=block.causal, enable_gqa=True)
    return linear(o.transpose(1, 2).flatten(2), block.out.weight, block.out.bias)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_torch_with_the_same_weights(heads: int, kv_heads: int, causal: bool) -> None:
    block = module(FlashAttention, 32, heads, kv_heads, causal=causal, bias=kv_heads == 2)
    x, do = normal(3, 17, 32).requires_grad_(), normal(3, 17, 32, seed=1)
    inputs = [x, *block.parameters()]
    o, expected = block(x), written_out(block, x)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    grads, expected_grads = (torch.autograd.grad(y, inputs, do) for y in (o, expected))
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_block_is_its_formula() -> None:
    block = module(Block, 32, 4, 2, hidden=48)
    x = normal(2, 9, 32)
    y = x + written_out(block.attention, layer_norm(x, (32,), block.attention_norm.weight))
    hidden = gelu(linear(layer_norm(y, (32,), block.mlp_norm.weight), block.mlp[0].weight))
    torch.testing.assert_close(block(x), y + linear(hidden, block.mlp[2].weight), rtol=1e-5, atol=1e-6)
    assert block.mlp[0].out_features == 48
    assert module(Block, 32, 4).mlp[0].out_features == 128
    assert [name for name, _ in module(Block, 32, 4, bias=True).named_parameters() if "bias" in name]
    assert not [name for name, _ in block.named_parameters() if "bias" in name]


def test_a_causal_block_knows_nothing_of_what_comes_after() -> None:
    block = module(Block, 32, 4)
    x = normal(1, 12, 32).requires_grad_()
    (seen,) = torch.autograd.grad(block(x)[:, 6].square().sum(), x)
    assert seen[:, :7].abs().amax(-1).min() > 0
    assert not seen[:, 7:].any()
    assert torch.autograd.grad(module(Block, 32, 4, causal=False)(x)[:, 6].sum(), x)[0][:, 7:].any()
    near = module(FlashAttention, 32, 4, window=(2, 1))
    (seen,) = torch.autograd.grad(near(x)[:, 6].square().sum(), x)
    assert seen[0].any(-1).nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_padding_is_not_read() -> None:
    block = module(Block, 32, 4, 2)
    x = normal(2, 9, 32)
    x[1, 5:] = float("nan")
    batch = block(x, torch.tensor([9, 5], device=DEVICE))
    # The rounding of the projections depends on the number of rows.
    torch.testing.assert_close(batch[0], block(x[:1])[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch[1, :5], block(x[1:, :5])[0], rtol=1e-5, atol=1e-6)


def test_dropout_is_for_training_alone() -> None:
    block = module(FlashAttention, 32, 4, dropout_p=0.5)
    x = normal(1, 9, 32)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_what_computes_it_is_an_argument() -> None:
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return attention(*args, **options)

    block = module(Block, 32, 4, attention=counted, window=(3, 0))
    x = normal(1, 9, 32)
    assert torch.equal(block(x), module(Block, 32, 4, window=(3, 0))(x))
    assert calls == [{"layout": "bshd", "causal": True, "window": (3, 0), "dropout_p": 0.0}]


def test_half_precision() -> None:
    block = module(Block, 32, 4, 2).to(torch.bfloat16)
    assert block(normal(2, 9, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_block_compiles_whole_forward_and_backward() -> None:
    torch.compiler.reset()
    block = module(Block, 32, 4, 2)
    x = normal(2, 9, 32)

    def run(call: Any) -> list[Tensor]:
        o = call(x)
        return [o, *torch.autograd.grad(o.square().sum(), list(block.parameters()))]

    for a, b in zip(run(torch.compile(block, fullgraph=True, backend="aot_eager")), run(block), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sizes", "field"), [((30, 4), "dim"), ((32, 0), "dim"), ((32, 4, 3), "kv_heads")])
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, ...], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        Block(*sizes)


def test_one_sequence_without_its_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="x: must be"):
        module(FlashAttention, 32, 4)(normal(9, 32))
