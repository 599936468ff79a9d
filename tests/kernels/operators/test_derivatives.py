"""Forward mode, `torch.func`, double backward: right for each option, alone and in pairs, and for each transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad, functional

from flashpoint_kernels import (
    ProblemError,
    attention,
    attention_backward,
    flash_attn,
    flex_attention,
    scaled_dot_product_attention,
)
from tests.conftest import DEVICE
from tests.support.covering import covering
from tests.support.kernels.solving import normal

# torch itself uses torch.jit.script for forward-mode derivatives, and warns once in each process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # of torch.func.linearize
]

SQ, SK, HEADS = 9, 11, 4
X = normal(1, 2, 6, 8)
OTHER, BATCH = normal(1, 2, 6, 8, seed=5), normal(3, 1, 2, 6, 8, seed=6)


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


# Each factor has the call without an option first; the keys that are tensors are differentiated if they can be.
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "mask": {
        "none": {}, "one row": {"attn_mask": normal(SK, seed=11)},
        "heads": {"attn_mask": normal(HEADS, SQ, SK, seed=11)},
        "sequences": {"attn_mask": normal(2, 1, SQ, SK, seed=11)},
        "bool": {"attn_mask": normal(SQ, SK, seed=11) > -0.5},
        "hidden": {"attn_mask": normal(SQ, 1, seed=11).masked_fill(normal(SQ, SK, seed=12) < 0, -torch.inf)},
    },
    "block_mask": {"none": {}, "one": {"block_mask": torch.tensor([[[[True]]], [[[False]]]]).to(DEVICE)}},
    "alibi": {"none": {}, "slopes": {"alibi_slopes": normal(HEADS, seed=13).abs()}},
    "sinks": {"none": {}, "sinks": {"sinks": normal(HEADS, seed=14)}},
    "lengths": {"none": {}, "short": {"q_lengths": integers(9, 4), "kv_lengths": integers(5, 0)}},
    "softcap": {"none": {}, "cap": {"softcap": 2.0}},
    "band": {"none": {}, "causal": {"causal": True}, "window": {"window": (3, 2)}},
    "offset": {"none": {}, "offset": {"offset": integers(2, -3)}},
    "dropout": {"none": {}, "dropout": {"dropout_p": 0.3, "dropout_seed": 5}},
    "scale": {"none": {}, "scale": {"scale": 0.7}},
    "layout": {"bhsd": {}, "bshd": {"layout": "bshd"}},
    "dims": {"grouped": {}, "other": {"_dims": (4, 8, 5)}},
}  # fmt: skip
CASES = covering(FACTORS)


def call_of(case: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors to differentiate and the other keywords of a case."""
    keywords: dict[str, Any] = {}
    for factor, level in case.items():
        keywords |= FACTORS[factor][level]
    kv_heads, dim, value_dim = keywords.pop("_dims", (2, 8, 8))
    tensors = {
        "q": normal(2, HEADS, SQ, dim), "k": normal(2, kv_heads, SK, dim, seed=1),
        "v": normal(2, kv_heads, SK, value_dim, seed=2),
    }  # fmt: skip
    if keywords.get("layout") == "bshd":
        tensors = {name: t.transpose(1, 2) for name, t in tensors.items()}
    for name in ("attn_mask", "sinks"):
        if name in keywords and keywords[name].is_floating_point():
            tensors[name] = keywords.pop(name)
    return tensors, keywords


def derivatives(tensors: dict[str, Tensor], keywords: dict[str, Any], dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Return the tangents of o and lse; those of the gradients along a direction; the gradients of gradients."""
    xs = [t.to(dtype) for t in tensors.values()]
    dots = [normal(*t.shape, seed=20 + n).to(dtype) for n, t in enumerate(xs)]

    def solve(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(tensors, inputs, strict=True))
        return attention(**given, **keywords, backend=backend, return_lse=True)

    def gradients(do: Tensor, dlse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = func.vjp(solve, *inputs)[1]((do, dlse))
        return found

    o, lse = solve(*xs)
    do, do_dot, dlse, dlse_dot = (normal(*t.shape, seed=30 + n).to(t.dtype) for n, t in enumerate((o, o, lse, lse)))
    tangents = func.jvp(solve, tuple(xs), tuple(dots))[1]
    of_gradients = func.jvp(gradients, (do, dlse, *xs), (do_dot, dlse_dot, *dots))[1]
    leaves = [t.clone().requires_grad_() for t in (do, dlse, *xs)]
    first = torch.autograd.grad(solve(*leaves[2:]), leaves[2:], leaves[:2], create_graph=True)
    return [*tangents, *of_gradients, *torch.autograd.grad(first, leaves, dots)]


BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@pytest.mark.parametrize("n", range(len(CASES)))
def test_derivatives_on_tiles_are_those_of_the_formula(n: int) -> None:
    """`tiled` is hand-written tiles, `reference` autograd over the formula: they share no derivative."""
    tensors, keywords = call_of(CASES[n])
    for dtype in list(BOUNDS)[: 3 if n % 4 == 0 else 1]:
        rounded = {name: t.to(dtype) for name, t in tensors.items()}
        found = derivatives(rounded, keywords, dtype, "auto")
        exact = derivatives(rounded, keywords, torch.float64, "reference")
        for place, (actual, expected) in enumerate(zip(found, exact, strict=True)):
            bound = BOUNDS[dtype] * max(1.0, float(expected.double().abs().max()))
            error = (actual.double() - expected.double()).abs().max()
            assert error <= bound, (CASES[n], dtype, place, float(error), bound)


@pytest.mark.parametrize("n", range(0, len(CASES), 4))
def test_the_formula_passes_torchs_checks(n: int) -> None:
    tensors, keywords = call_of(CASES[n])
    tensors = {name: t.double().requires_grad_() for name, t in tensors.items()}

    def solve(*inputs: Tensor) -> Tensor:
        return attention(**dict(zip(tensors, inputs, strict=True)), **keywords, backend="reference")

    hides = bool((tensors["attn_mask"] == -torch.inf).any()) if "attn_mask" in tensors else False
    inputs = tuple(t.detach() if hides and name == "attn_mask" else t for name, t in tensors.items())
    check = {"fast_mode": True, "check_batched_grad": False, "nondet_tol": 0.0}
    assert torch.autograd.gradcheck(solve, inputs, check_forward_ad=True, **check)
    assert torch.autograd.gradgradcheck(solve, inputs, **check)


def test_packed_sequences_and_small_tiles() -> None:
    t = {"q": normal(12, 4, 8), "k": normal(15, 2, 8, seed=1), "v": normal(15, 2, 6, seed=2)}
    keywords = {
        "layout": "thd", "cu_seqlens_q": integers(0, 3, 3, 12), "cu_seqlens_k": integers(0, 3, 4, 15), "causal": True
    }  # fmt: skip
    found = derivatives(t, keywords, torch.float32, "auto")
    exact = derivatives(t, keywords, torch.float64, "reference")
    for actual, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tile", [(4, 3), (16, 64)])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "dropout_p": 0.3, "dropout_seed": 3, "causal": True}], ids=str
)
def test_several_tiles(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int], options: dict[str, Any]) -> None:
    from flashpoint_kernels.tiled_backend import derivatives as tiles

    monkeypatch.setattr(tiles, "FORWARD_TILE", tile)
    monkeypatch.setattr(tiles, "BACKWARD_TILE", tile)
    t = {"q": normal(2, 4, 37, 8), "k": normal(2, 2, 41, 8, seed=1), "v": normal(2, 2, 41, 8, seed=2)}
    mask = {"attn_mask": normal(37, 41, seed=3)}
    found = derivatives(t | mask, options, torch.float32, "tiled")
    exact = derivatives(t | mask, options, torch.float64, "reference")
    for actual, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=3e-5)


Solve = Callable[[Tensor], Tensor]


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def dual(solve: Solve) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(solve(forward_ad.make_dual(X, OTHER))).tangent
        return found


def along(solve: Solve, inside: bool) -> Tensor:
    """Return the tangent of a gradient whose `do` has one; `inside`: the forward, too, runs in the level."""
    q = X.clone().requires_grad_()
    o = None if inside else solve(q)
    with forward_ad.dual_level():
        (dq,) = torch.autograd.grad(solve(q) if o is None else o, q, forward_ad.make_dual(X, OTHER))
        found: Tensor = forward_ad.unpack_dual(dq).tangent
        return found


def batched(solve: Solve) -> Tensor:
    q = X.clone().requires_grad_()
    return torch.autograd.grad(solve(q), q, BATCH, is_grads_batched=True)[0]


def penalty(solve: Solve) -> Tensor:
    q = X.clone().requires_grad_()
    (dq,) = torch.autograd.grad(solve(q).square().sum(), q, create_graph=True)
    return torch.autograd.grad((dq.norm() - 1).square(), q)[0]


def loss_of(solve: Solve) -> Solve:
    return lambda q: solve(q).square().sum()


TRANSFORMS: dict[str, Callable[[Solve], Any]] = {
    "grad": lambda f: func.grad(loss_of(f))(X),
    "vjp": lambda f: func.vjp(f, X)[1](OTHER)[0],
    "jvp": lambda f: func.jvp(f, (X,), (OTHER,))[1],
    "linearize": lambda f: func.linearize(f, X)[1](OTHER),
    "jacfwd": lambda f: func.jacfwd(f)(X),
    "jacrev": lambda f: func.jacrev(f)(X),
    "hessian": lambda f: func.hessian(loss_of(f))(X),
    "grad of grad": lambda f: func.grad(lambda q: func.grad(loss_of(f))(q).sum())(X),
    "jvp of grad": lambda f: func.jvp(func.grad(loss_of(f)), (X,), (OTHER,))[1],
    "grad of jvp": lambda f: func.grad(lambda q: func.jvp(f, (q,), (OTHER,))[1].sin().sum())(X),
    "grad of jvp's direction": lambda f: func.grad(lambda t: func.jvp(f, (X,), (t,))[1].sin().sum())(OTHER),
    "jacrev of jacfwd": lambda f: func.jacrev(func.jacfwd(loss_of(f)))(X),
    "vmap": lambda f: func.vmap(f)(BATCH),
    "vmap of grad": lambda f: func.vmap(func.grad(loss_of(f)))(BATCH),
    "grad of vmap": lambda f: func.grad(lambda x: func.vmap(f)(x).sin().sum())(BATCH),
    "jvp of vmap": lambda f: func.jvp(func.vmap(f), (BATCH,), (BATCH + 1,))[1],
    "vmap of jvp": lambda f: func.vmap(lambda x, t: func.jvp(f, (x,), (t,))[1])(BATCH, BATCH + 1),
    "dual numbers": dual,
    "jvp of the backward": lambda f: along(f, inside=True),
    "jvp of an earlier backward": lambda f: along(f, inside=False),
    "is_grads_batched": batched,
    "gradient penalty": penalty,
    "functional.jvp": lambda f: functional.jvp(f, X, OTHER)[1],
    "functional.hvp": lambda f: functional.hvp(loss_of(f), X, OTHER)[1],
    "functional.vhp": lambda f: functional.vhp(loss_of(f), X, OTHER)[1],
    "functional.jacobian": lambda f: functional.jacobian(f, X, vectorize=True),
    "functional.jacobian forward": lambda f: functional.jacobian(f, X, vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f: functional.hessian(loss_of(f), X),
    "functional.hessian vectorized": lambda f: functional.hessian(loss_of(f), X, vectorize=True),
}
REFUSED: dict[str, tuple[str, Callable[[Solve], Any]]] = {
    "jvp of jvp": (
        "a tangent of attention has no tangent of its own", lambda f: func.jacfwd(func.jacfwd(loss_of(f)))(X),
    ),
    "third derivative": (
        "third-order derivatives of attention are not available",
        lambda f: func.grad(lambda q: func.grad(lambda x: func.grad(loss_of(f))(x).sum())(q).sum())(X),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"backend": "tiled"}], ids=["plain", "tiled"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_transform_is_right(transform: str, options: dict[str, Any]) -> None:
    found = TRANSFORMS[transform](lambda q: attention(q, OTHER, OTHER, **options))
    expected = TRANSFORMS[transform](lambda q: formula(q, OTHER, OTHER))
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


KEYS, ENDS = OTHER.transpose(1, 2), integers(0, 6)


def packed(solve: Callable[..., Tensor], q: Tensor) -> Tensor:
    """Return the answer of a function of packed sequences, for one sequence."""
    return solve(q[0].transpose(0, 1), KEYS[0], KEYS[0], ENDS, ENDS, 6, 6).transpose(0, 1)[None]


OTHER_FUNCTIONS: dict[str, Solve] = {
    "scaled_dot_product_attention": lambda q: scaled_dot_product_attention(q, OTHER, OTHER),
    "flash_attn_func": lambda q: flash_attn.flash_attn_func(q.transpose(1, 2), KEYS, KEYS).transpose(1, 2),
    "flash_attn_kvpacked_func": lambda q: flash_attn.flash_attn_kvpacked_func(
        q.transpose(1, 2), torch.stack([KEYS, KEYS], 2)
    ).transpose(1, 2),
    "flash_attn_qkvpacked_func": lambda q: flash_attn.flash_attn_qkvpacked_func(
        torch.stack([q.transpose(1, 2), KEYS, KEYS], 2)
    ).transpose(1, 2),
    "flash_attn_varlen_func": lambda q: packed(flash_attn.flash_attn_varlen_func, q),
}
QUICK = ("jvp", "gradient penalty", "vmap")  # of the transforms of the other functions


@pytest.mark.parametrize(
    "transform", [pytest.param(t, marks=[] if t in QUICK else [pytest.mark.slow]) for t in TRANSFORMS]
)
@pytest.mark.parametrize("function", OTHER_FUNCTIONS)
def test_each_transform_of_the_other_functions_is_right(function: str, transform: str) -> None:
    if (function, transform) == ("flash_attn_varlen_func", "linearize"):  # it traces with tensors without values
        with pytest.raises(RuntimeError, match="tracing tensor"):
            TRANSFORMS[transform](OTHER_FUNCTIONS[function])
        return
    found = TRANSFORMS[transform](OTHER_FUNCTIONS[function])
    expected = TRANSFORMS[transform](lambda q: formula(q, OTHER, OTHER))
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


TABLE, ROWS = normal(2, 11, seed=7), torch.arange(6, dtype=torch.int64, device=DEVICE)


def flex(q: Tensor, table: Tensor = TABLE) -> Tensor:
    """Return flex_attention with a score_mod that is not linear and captures a table."""
    return flex_attention(q, OTHER, OTHER, lambda s, b, h, i, j: 2 * torch.tanh(s) * table[h, i - j + 5] + 0.1 * s * s)


def flex_formula(q: Tensor, table: Tensor = TABLE) -> Tensor:
    s = q @ OTHER.mT / q.shape[-1] ** 0.5
    return torch.softmax(2 * torch.tanh(s) * table[:, ROWS[:, None] - ROWS + 5] + 0.1 * s * s, -1) @ OTHER


@pytest.mark.parametrize(
    "transform",
    [pytest.param(t, marks=[pytest.mark.slow] if "hessian" in t or "jac" in t else []) for t in TRANSFORMS],
)
def test_each_transform_of_flex_attention_is_right(transform: str) -> None:
    if transform == "linearize":  # it traces with tensors without values, which flex's blocks need
        with pytest.raises(RuntimeError, match="tracing tensor"):
            TRANSFORMS[transform](flex)
        return
    found, expected = TRANSFORMS[transform](flex), TRANSFORMS[transform](flex_formula)
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=5e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 11), (2, 1), (1, 11)], ids=str)
def test_flex_differentiates_captured_tables_twice(shape: tuple[int, int]) -> None:
    """Expanded tables, too: a captured tensor of size 1 in a dimension is the sum of what its elements get."""
    inputs = X.double().requires_grad_(), normal(*shape, seed=8).double().requires_grad_()

    def solve(q: Tensor, table: Tensor) -> Tensor:
        whole, other = table.expand(2, 11), OTHER.double()
        return flex_attention(q, other, other, lambda s, b, h, i, j: torch.sin(s) * whole[h, i - j + 5])

    assert torch.autograd.gradcheck(solve, inputs, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(solve, inputs, fast_mode=True)


@pytest.mark.parametrize("transform", REFUSED)
def test_what_is_not_available_raises(transform: str) -> None:
    message, call = REFUSED[transform]
    with pytest.raises(RuntimeError, match=message):
        call(lambda q: attention(q, OTHER, OTHER))
    with pytest.raises(RuntimeError, match=message):
        call(flex)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_what_is_differentiated_again_keeps_its_bits_and_its_backend(backend: str) -> None:
    dtype = torch.float64 if backend == "reference" else torch.float32
    solve = partial(attention, k=OTHER.to(dtype), v=OTHER.to(dtype), backend=backend)
    q = X.to(dtype).clone().requires_grad_()
    o = solve(q)
    (dq,) = torch.autograd.grad(o, q, o.detach(), retain_graph=True)
    (again,) = torch.autograd.grad(o, q, o.detach(), create_graph=True)
    with forward_ad.dual_level():
        primal, _ = forward_ad.unpack_dual(solve(q.detach()))
    assert torch.equal(o, primal)
    assert torch.equal(o, func.vmap(solve)(q.detach()[None])[0])
    assert torch.equal(dq, again)
    assert torch.equal(dq, func.vjp(solve, q.detach())[1](o.detach())[0])
    refused = rf"backend: {backend} has no forward-mode or second derivatives: use auto, tiled or reference"
    calls: Sequence[Callable[[], Any]] = (
        lambda: torch.autograd.grad(again.sum(), q), lambda: func.jvp(solve, (q.detach(),), (q.detach(),))
    )  # fmt: skip
    for call in calls:
        if backend == "cpu":
            with pytest.raises(ProblemError, match=refused):
                call()
        else:
            call()


def test_gradients_of_attention_backward() -> None:
    """`attention_backward` is a function of do and the inputs; o and lse follow from them."""
    do, q = OTHER.clone().requires_grad_(), X.clone().requires_grad_()
    expected = torch.autograd.grad(formula(q, OTHER, OTHER), q, do, create_graph=True)[0]
    exact = torch.autograd.grad(expected.sin().sum(), (do, q))
    o, lse = attention(X, OTHER, OTHER, return_lse=True)
    for given in ((), (o, lse)):
        dq = attention_backward(do, q, OTHER, OTHER, *given)[0]
        for found, right in zip(torch.autograd.grad(dq.sin().sum(), (do, q)), exact, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    with pytest.raises(ProblemError, match="o: is the forward's answer and has no gradient of its own: detach it"):
        attention_backward(do, X, OTHER, OTHER, o.clone().requires_grad_(), lse)


def test_slopes_have_no_tangent() -> None:
    slopes = normal(2).abs()
    with pytest.raises(ProblemError, match="alibi_slopes: has no derivative"):
        func.jvp(lambda t: attention(X, X, X, alibi_slopes=t), (slopes,), (slopes,))
