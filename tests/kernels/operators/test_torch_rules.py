"""`attention` raises for missing derivatives, transforms and NestedTensors, and follows SDPA under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, functional

from flashpoint_kernels import ProblemError, attention, attention_backward, quantize
from flashpoint_kernels.modules import Block
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

# torch itself uses torch.jit.script for forward-mode derivatives, and warns once in each process.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

X = normal(1, 2, 6, 8)
SECOND = "second-order gradients of attention are not available"
FORWARD = "forward-mode derivatives of attention are not available"
BATCHED = "vmap of a gradient of attention is not available"
FUNC = "torch.func does not differentiate attention"

# Options for both paths of `attention` with kernels in C: operators/plain.py, and ops.py for dropout.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": 3.0}, "dropout": {"dropout_p": 0.3, "dropout_seed": 1},
}  # fmt: skip
ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def leaf(t: Tensor = X) -> Tensor:
    return t.detach().clone().requires_grad_()


@ways
@pytest.mark.parametrize("of", ["q", "k", "v", "attn_mask", "sinks", "do", "dlse"])
def test_a_second_derivative_raises_whatever_it_is_taken_of(options: dict[str, Any], of: str) -> None:
    more = {"attn_mask": normal(6, 6), "sinks": normal(2)} if of in ("attn_mask", "sinks") else {}
    t = {name: leaf(x) for name, x in {"q": X, "k": X, "v": X, **more}.items()}
    given = {"do": leaf(), "dlse": leaf(X[..., 0])}
    o, lse = attention(**t, return_lse=True, **options)
    first = torch.autograd.grad((o, lse), tuple(t.values()), tuple(given.values()), create_graph=True)
    for gradient in first:
        with pytest.raises(RuntimeError, match=SECOND):
            torch.autograd.grad(gradient.square().sum(), (t | given)[of], retain_graph=True)


@ways
def test_a_gradient_penalty_raises(options: dict[str, Any]) -> None:
    """The backward pass of a gradient penalty raises an error, also if `weight` affects dq only through do."""
    q, weight = leaf(), leaf()
    (dq,) = torch.autograd.grad((attention(q, X, X, **options) * weight).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):
        (dq.norm() - 1).square().backward()
    do = leaf()
    with pytest.raises(RuntimeError, match=SECOND):
        attention_backward(do, X, X, X, **options)[0].sum().backward()


@ways
def test_transforms_raise_and_never_answer_zero(options: dict[str, Any]) -> None:
    def solve(q: Tensor) -> Tensor:
        return attention(q, X, X, **options)

    def loss(q: Tensor) -> Tensor:
        return solve(q).square().sum()

    def forward_over_reverse(inside: bool) -> None:
        q = leaf()
        o = None if inside else solve(q)
        with forward_ad.dual_level():
            torch.autograd.grad(solve(q) if o is None else o, q, forward_ad.make_dual(X, X))

    batch, f = X[None].expand(3, -1, -1, -1, -1), torch.func
    raising: list[tuple[str, Callable[[], Any]]] = [
        (FUNC, lambda: f.grad(loss)(X)),
        (FUNC, lambda: f.grad(lambda q: f.grad(loss)(q).sum())(X)),
        (FUNC, lambda: f.vjp(solve, X)[1](X)),
        (FUNC, lambda: f.jacrev(solve)(X)),
        (FUNC, lambda: f.vmap(f.grad(loss))(batch)),
        (FUNC, lambda: f.grad(lambda x: f.vmap(solve)(x).sum())(batch)),
        (FORWARD, lambda: f.jvp(solve, (X,), (X,))),
        (FORWARD, lambda: f.jvp(lambda x: f.vmap(solve)(x), (batch,), (batch,))),
        (FORWARD, lambda: f.jacfwd(solve)(X)),
        (FORWARD, lambda: f.hessian(loss)(X)),
        (FORWARD, lambda: f.linearize(solve, X)),
        (FORWARD, lambda: f.jvp(lambda do: attention_backward(do, X, X, X, **options)[0], (X,), (X,))),
        (FORWARD, lambda: functional.jacobian(solve, X, vectorize=True, strategy="forward-mode")),
        (FORWARD, lambda: forward_over_reverse(inside=True)),
        (FORWARD, lambda: forward_over_reverse(inside=False)),
        (SECOND, lambda: functional.jvp(solve, X, X)),
        (SECOND, lambda: functional.hvp(loss, X, X)),
        (SECOND, lambda: functional.vhp(loss, X, X)),
        (SECOND, lambda: functional.hessian(loss, X)),
        (BATCHED, lambda: functional.jacobian(solve, X, vectorize=True)),
        (BATCHED, lambda: torch.autograd.grad(solve(q := leaf()), q, batch, is_grads_batched=True)),
    ]
    for number, (message, call) in enumerate(raising):
        with pytest.raises(RuntimeError, match=message):
            pytest.fail(f"number {number} gave {call()}")
    with forward_ad.dual_level():
        assert torch.equal(solve(X), attention(X, X, X, **options))  # no error: X has no tangent
    f.grad(lambda q: (q * solve(X)).sum())(X)  # the transform treats solve(X) as a constant


def test_gradcheck_and_gradgradcheck() -> None:
    x = leaf(normal(1, 1, 3, 4).double())

    def solve(q: Tensor) -> Tensor:
        return attention(q, q, q, backend="reference")

    assert torch.autograd.gradcheck(solve, x)
    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.gradgradcheck(solve, x)
    with pytest.raises(RuntimeError, match=FORWARD):
        torch.autograd.gradcheck(solve, x, check_forward_ad=True)


def test_a_modules_second_derivative_raises() -> None:
    block, x = Block(16, heads=2).to(DEVICE), leaf(normal(1, 5, 16))
    (dx,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):
        dx.norm().backward()


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
