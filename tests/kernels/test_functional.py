"""`attention` with autograd and `attention_backward` give the right gradients."""

import inspect
import math
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, ProblemError, attention, attention_backward, native
from tests.conftest import DEVICE, FUSED
from tests.support.kernels.solving import backward, forward, normal, qkv

NAMES = ("q", "k", "v")


def leaves(**kwargs: Any) -> dict[str, torch.Tensor]:
    t = qkv(2, 4, 5, 7, 8, kv_heads=2, value_dim=12, **kwargs)
    return {name: x.requires_grad_() for name, x in t.items() if name != "do"}


def test_the_calls_take_the_options_of_the_contract() -> None:
    parameters = inspect.signature(attention).parameters
    defaults = {f.name: f.default for f in fields(Options) if f.name != "grads"}
    assert {name: parameters[name].default for name in defaults} == defaults
    parameters = inspect.signature(attention_backward).parameters
    forward = ("return_lse", "return_key_weights")
    defaults = {f.name: f.default for f in fields(Options) if f.name not in forward}
    assert {name: parameters[name].default for name in defaults} == defaults
    assert list(parameters)[:6] == ["do", "q", "k", "v", "o", "lse"]


def test_gradients_through_o_and_lse() -> None:
    """Gradients through o and lse equal autograd's of the plain formula, for every differentiable input."""
    t = leaves() | {"attn_mask": normal(4, 1, 7).requires_grad_(), "sinks": normal(4).requires_grad_()}
    o, lse = attention(**t, return_lse=True)
    plain = {name: x.detach().double().requires_grad_() for name, x in t.items()}
    s = plain["q"] @ plain["k"].repeat_interleave(2, 1).mT / math.sqrt(8) + plain["attn_mask"]
    sink = plain["sinks"][:, None, None].expand(2, 4, 5, 1)
    expected_lse = torch.logsumexp(torch.cat([s, sink], -1), -1)
    expected = torch.exp(s - expected_lse[..., None]) @ plain["v"].repeat_interleave(2, 1)
    (o.sin().sum() + lse.cos().sum()).backward()
    (expected.sin().sum() + expected_lse.cos().sum()).backward()
    torch.testing.assert_close(o.double(), expected, rtol=2e-6, atol=2e-6)
    for name, x in t.items():
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad.double(), plain[name].grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("loss", ["o", "lse"])
def test_a_loss_of_one_answer_alone(loss: str) -> None:
    t = leaves()
    o, lse = attention(**t, return_lse=True)
    (o if loss == "o" else lse).sum().backward()
    do = torch.ones_like(o) if loss == "o" else torch.zeros_like(o)
    dlse = {} if loss == "o" else {"dlse": torch.ones_like(lse)}
    expected = backward("reference", {name: x.detach() for name, x in t.items()} | {"do": do} | dlse)
    for name in NAMES:
        torch.testing.assert_close(t[name].grad, expected[f"d{name}"], rtol=1e-5, atol=1e-6)


def test_only_what_requires_a_gradient_gets_one() -> None:
    t = leaves()
    t["k"].requires_grad_(False)
    attention(**t).sum().backward()
    assert t["k"].grad is None
    assert t["q"].grad is not None
    with torch.no_grad():
        assert not attention(**t).requires_grad
    assert attention(**{name: x.detach() for name, x in t.items()}).grad_fn is None


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_strided_leaves_and_gradients(layout: str) -> None:
    """As in a fused projection, q, k and v are strided views of one tensor, and so are their gradients."""
    fused = normal(2, 6, 3, 4, 8).requires_grad_()
    views = fused if layout == "bshd" else fused.flatten(0, 1)
    cu = torch.tensor([0, 6, 12])
    index = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if layout == "thd" else {}
    o = attention(*views.unbind(-3), layout=layout, causal=True, **index)
    weights = normal(*o.shape[::-1]).permute(*range(o.ndim)[::-1])  # a gradient that is not contiguous
    (o * weights).sum().backward()
    plain = fused.detach().requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in plain.unbind(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    (
        expected * weights.view(2, 6, 4, 8) if layout == "bshd" else expected * weights.unflatten(0, (2, 6))
    ).sum().backward()
    torch.testing.assert_close(fused.grad, plain.grad, rtol=1e-5, atol=2e-6)


def test_dropout_backward_drops_what_forward_dropped() -> None:
    """Without a given seed, the backward has the forward's P̃ (P after dropout): v's gradient is P̃ᵀ·do."""
    t = leaves()
    t["v"] = torch.eye(7, device=DEVICE).expand(2, 2, 7, 7).clone().requires_grad_()
    o = attention(**t, dropout_p=0.5)
    dropped = o.detach()  # v is the identity, so o is P̃
    assert 0.2 < (dropped == 0).float().mean() < 0.8
    do = normal(*o.shape)
    o.backward(do)
    torch.testing.assert_close(t["v"].grad, (dropped.mT @ do).unflatten(1, (2, 2)).sum(2), rtol=1e-5, atol=1e-6)


def test_seeds_repeat_and_no_seed_varies() -> None:
    t = {name: x.detach() for name, x in leaves().items()}
    first, again, other = (attention(**t, dropout_p=0.5, dropout_seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(attention(**t, dropout_p=0.5), attention(**t, dropout_p=0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    t = leaves(dtype=dtype)
    o, lse = attention(**t, return_lse=True)
    assert o.dtype == dtype
    assert lse.dtype == torch.float32
    o.sum().backward()
    assert all(x.grad.dtype == dtype for x in t.values())


def test_slopes_that_require_a_gradient_are_refused() -> None:
    t, slopes = leaves(), torch.ones(4, device=DEVICE, requires_grad=True)
    with pytest.raises(ProblemError, match="alibi_slopes: has no gradient"):
        attention(**t, alibi_slopes=slopes)
    with torch.no_grad():
        assert attention(**t, alibi_slopes=slopes).isfinite().all()


def test_misspelt_options_are_refused() -> None:
    with pytest.raises(TypeError, match="is_causal"):
        attention(**leaves(), is_causal=True)  # type: ignore[call-arg]


def test_what_is_not_a_tensor_is_refused_by_name() -> None:
    t = leaves()
    with pytest.raises(ProblemError, match="sinks: must be a torch tensor, not list"):
        attention(**t, sinks=[1.0] * 4)  # type: ignore[arg-type]


def test_backward_returns_what_was_asked_in_that_order() -> None:
    t = qkv(2, 4, 5, 7, 8, kv_heads=2)
    saved = forward("tiled", t)
    expected = backward("reference", t)
    dv, dq = attention_backward(**t, **saved, grads=["dv", "dq"])
    torch.testing.assert_close(dv, expected["dv"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dq, expected["dq"], rtol=1e-5, atol=1e-6)


def test_backward_without_o_and_lse_runs_the_forward() -> None:
    t = qkv(2, 4, 5, 7, 8, kv_heads=2)
    for backend in (FUSED, "tiled"):
        brought = attention_backward(**t, **forward(backend, t), backend=backend)
        made = attention_backward(**t, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(brought, made, strict=True))
    with pytest.raises(ProblemError, match="send o and lse together"):
        attention_backward(**t, o=t["do"])


def test_inference_mode_reaches_the_threads_that_compute_the_parts() -> None:
    x = torch.randn(1, 8, 512, 40)
    expected = attention(x, x, x, softcap=3.0), *attention_backward(x, x, x, x)
    with torch.inference_mode():
        actual = attention(x, x, x, softcap=3.0), *attention_backward(x, x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


FORKS = """
import os, signal, torch
from flashpoint_kernels import attention
x = torch.randn(1, 8, 512, 40)
expected = attention(x, x, x, softcap=3.0)
if not (child := os.fork()):
    signal.alarm(60)
    os._exit(0 if torch.equal(attention(x, x, x, softcap=3.0), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(native.library() is None, reason="torch's own threads do not survive a fork; those in C do")
def test_a_forked_child_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n", done
