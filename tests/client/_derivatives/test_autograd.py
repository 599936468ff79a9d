"""`flashpoint.torch.attention` raises for unsupported derivatives, transforms and NestedTensors; it obeys autocast."""

from functools import partial

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from torch.autograd import forward_ad, functional

import flashpoint
import flashpoint.torch
from flashpoint_kernels import quantize
from flashpoint_kernels.modules import Block
from tests.support.oracle import tensors

# torch's forward-mode derivatives use torch.jit.script, which warns about its deprecation once in each process.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

X = tensors(1, 2, 6, 8, n=1)[0]
SECOND = "second-order gradients of attention are not available over HTTP: use flashpoint_kernels"
FORWARD = "forward-mode derivatives of attention are not available over HTTP; .* flashpoint_kernels"
VMAP = 'vmap of served attention is not available: .* layout="thd"'
FUNC = "torch.func does not differentiate attention over HTTP: .* flashpoint_kernels"


@pytest.fixture(scope="module")
def client(server):
    with flashpoint.Client(server.url) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["sent", "saved"])
def attention(client, request):
    return partial(flashpoint.torch.attention, client=client, save=request.param)


def leaf(t=X):
    return t.detach().clone().requires_grad_()


def test_a_second_derivative_raises_whatever_it_is_taken_of(attention):
    t = {"q": leaf(), "k": leaf(), "v": leaf(), "attn_mask": leaf(X[0, 0, :, :6]), "sinks": leaf(X[0, :, 0, 0])}
    given = {"do": leaf(), "dlse": leaf(X[..., 0])}
    o, lse = attention(**t, return_lse=True)
    first = torch.autograd.grad((o, lse), tuple(t.values()), tuple(given.values()), create_graph=True)
    for gradient in first:
        for of in (t | given).values():
            with pytest.raises(RuntimeError, match=SECOND):
                torch.autograd.grad(gradient.square().sum(), of, retain_graph=True)


def test_a_gradient_penalty_raises(attention):
    """The backward of a gradient penalty needs second derivatives of attention, which raise."""
    q, weight = leaf(), leaf()
    (dq,) = torch.autograd.grad((attention(q, X, X) * weight).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):
        (dq.norm() - 1).square().backward()


def test_a_modules_second_derivative_raises(attention):
    block, x = Block(16, heads=2, attention=attention), leaf(tensors(1, 5, 16, n=1)[0])
    (dx,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=SECOND):
        dx.norm().backward()


def test_transforms_raise_and_never_answer_zero(client):
    def solve(q, **more):
        return flashpoint.torch.attention(q, X, X, client=client, **more)

    def loss(q):
        return solve(q).square().sum()

    def dual(**given):
        with forward_ad.dual_level():
            solve(X, **{name: forward_ad.make_dual(t, t) for name, t in given.items()})

    def forward_over_reverse():
        o = solve(q := leaf())
        with forward_ad.dual_level():
            torch.autograd.grad(o, q, forward_ad.make_dual(X, X))

    batch, f = X[None].expand(3, -1, -1, -1, -1), torch.func
    for number, (message, call) in enumerate([
        (FUNC, lambda: f.grad(loss)(X)),
        (FUNC, lambda: f.grad(lambda q: f.grad(loss)(q).sum())(X)),
        (FUNC, lambda: f.vjp(solve, X)[1](X)),
        (FUNC, lambda: f.jacrev(solve)(X)),
        (FORWARD, lambda: f.jvp(solve, (X,), (X,))),
        (FORWARD, lambda: f.jacfwd(solve)(X)),
        (FORWARD, lambda: f.hessian(loss)(X)),
        (FORWARD, lambda: f.linearize(solve, X)),
        (FORWARD, lambda: functional.jacobian(solve, X, vectorize=True, strategy="forward-mode")),
        (FORWARD, forward_over_reverse),
        (FORWARD, lambda: dual(sinks=X[0, :, 0, 0])),
        (FORWARD, lambda: dual(alibi_slopes=X[0, :, 0, 0])),
        (SECOND, lambda: functional.jvp(solve, X, X)),
        (SECOND, lambda: functional.hvp(loss, X, X)),
        (SECOND, lambda: functional.hessian(loss, X)),
        (VMAP, lambda: f.vmap(solve)(batch)),
        (VMAP, lambda: functional.jacobian(solve, X, vectorize=True)),
        (VMAP, lambda: torch.autograd.grad(solve(q := leaf()), q, batch, is_grads_batched=True)),
    ]):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            pytest.fail(f"number {number} gave {call()}")
    x = leaf(tensors(1, 1, 3, 4, dtype=torch.float64, n=1)[0])
    served = partial(flashpoint.torch.attention, k=x.detach().clone(), v=x.detach().clone(), client=client)
    assert torch.autograd.gradcheck(served, x)
    with pytest.raises(RuntimeError, match=SECOND):
        torch.autograd.gradgradcheck(served, x)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_what_to_do(client, layout):
    parts = [tensors(n, 2, 8, n=1)[0] for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    for call in (client.attention, partial(flashpoint.torch.attention, client=client)):
        with pytest.raises(flashpoint.InvalidInputError, match=r'q: is a NestedTensor: .* layout="thd"'):
            call(nested, nested, nested)


def test_8_bits_have_a_forward_and_no_backward(client):
    k, k_scale = quantize(X, torch.int8)
    q, scales = leaf(), {"k_scale": k_scale, "v_scale": k_scale}
    o = flashpoint.torch.attention(q, k, k, client=client, **scales)
    assert torch.equal(o, client.attention(X, k, k, **scales))
    with pytest.raises(flashpoint.InvalidInputError, match="k_scale: is only for the forward"):
        o.sum().backward()


@pytest.mark.parametrize("kinds", [("float32", "float32", "bfloat16"), ("bfloat16", "float16", "float32"),
                                   ("float32",) * 3, ("float64",) * 3], ids=str)  # fmt: skip
def test_autocast_does_as_for_sdpa(attention, kinds):
    def inputs():
        given = tensors(1, 2, 6, 8, n=3)
        return [leaf(t.to(getattr(torch, kind))) for t, kind in zip(given, kinds, strict=True)]

    results = []
    for call in (attention, torch.nn.functional.scaled_dot_product_attention):
        with torch.autocast("cpu"):
            o = call(*(given := inputs()))
            with torch.autocast("cpu", dtype=torch.float16):
                inner = call(*inputs()).dtype
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                if len(set(kinds)) == 1:
                    assert call(*inputs()).dtype == given[0].dtype
                else:
                    with pytest.raises((RuntimeError, ValueError), match="dtype"):
                        call(*inputs())
            with torch.no_grad():
                assert call(*given).dtype == o.dtype
        o.sum().backward()
        results.append((o, inner, [t.grad for t in given]))
    (o, inner, grads), (expected, expected_inner, expected_grads) = results
    assert (o.dtype, inner) == (expected.dtype, expected_inner)
    torch.testing.assert_close(o, expected, rtol=2**-6, atol=2**-6)
    for grad, exact in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, exact, rtol=2**-5, atol=2**-5)  # this also checks the dtype


@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:User provided device_type of 'cuda'")
def test_autocast_for_another_device_changes_nothing(client):
    with torch.autocast("cuda", dtype=torch.float16):
        assert flashpoint.torch.attention(X, X, X, client=client).dtype == torch.float32


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo causes this warning at every graph break
@pytest.mark.parametrize("save", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_program_calls_between_two_graphs(client, save):
    def call(q):
        return flashpoint.torch.attention(q.sin(), X, X, client=client, save=save, causal=True).cos()

    torch.compiler.reset()
    results = []
    for function in (call, torch.compile(call, backend="aot_eager")):
        q = leaf()
        o = function(q)
        results.append((o, *torch.autograd.grad(o.sum(), q)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("dims", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_head_dimensions_of_0_are_served(attention, dims):
    q, k, v = (leaf(tensors(1, 2, length, dim, n=1)[0]) for length, dim in ((5, dims[0]), (7, dims[0]), (7, dims[1])))
    actual = (o := attention(q, k, v)), *torch.autograd.grad(o.square().sum(), (q, k, v))
    local = (
        (o := torch.nn.functional.scaled_dot_product_attention(q, k, v)),
        *torch.autograd.grad(o.square().sum(), (q, k, v)),
    )
    for each, expected in zip(actual, local, strict=True):
        torch.testing.assert_close(each, expected)
