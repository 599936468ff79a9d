"""The program of docs/algorithm.md runs, and each of its equations holds in float64.

An equation has a name, a formula and Python code, in that order. Each name has exactly one check here.
The checks compare with torch's functions, autograd and the library, never with the page's numbers alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import attention, attention_backward
from flashpoint_kernels.nano import nano_attention
from flashpoint_kernels.timing.case import Case, flops, moved_bytes
from tests.conftest import DEVICE

PAGE = (Path(__file__).parents[2] / "docs" / "algorithm.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EQUATION = re.compile(r"^\*\*\(([a-z-]+)\)\*\*\n\n\$\$\n([^$]+)\n\$\$\n\n```python\n", re.MULTILINE)
Page = SimpleNamespace
Check = Callable[[Page], None]
CHECKS: dict[str, Check] = {}


def close(a: Tensor, b: Tensor) -> None:
    """Assert equality up to float64's rounding of sums of a few dozen terms of about 1."""
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def checks(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        assert name not in CHECKS
        CHECKS[name] = check
        return check

    return add


def gradients(page: Page, loss: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return autograd's gradients of Σ dO∘O if `loss` returns a matrix O, else of the scalar that `loss` returns."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    answer = loss(*leaves)
    return torch.autograd.grad((answer * page.dO).sum() if answer.ndim else answer, leaves)


def of_scores(page: Page) -> Callable[[Tensor], Tensor]:
    return lambda s: torch.softmax(s, 1) @ page.V


def of_inputs(page: Page) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: scaled_dot_product_attention(q[None], k[None], v[None])[0]


@pytest.fixture(scope="module")
def page() -> Page:
    names: dict[str, object] = {}
    for code in PYTHON.findall(PAGE):
        exec(code, names)
    return Page(**{name: value for name, value in names.items() if not name.startswith("__")})


def test_every_equation_has_its_check_and_its_formula() -> None:
    named = [name for name, _ in EQUATION.findall(PAGE)]
    assert len(set(named)) == len(named)
    assert set(named) == set(CHECKS)
    # Every formula has a name, and every name has a formula and Python code.
    assert PAGE.count("\n$$\n") == 2 * len(named)
    assert len(re.findall(r"^\*\*\(", PAGE, re.MULTILINE)) == len(named)


@pytest.mark.parametrize("name", [name for name, _ in EQUATION.findall(PAGE)])
def test_equation(page: Page, name: str) -> None:
    CHECKS[name](page)


def test_the_library_and_nano_compute_what_the_page_does(page: Page) -> None:
    inputs = [x[None, None].to(DEVICE) for x in (page.Q, page.K, page.V)]
    o, lse = attention(*inputs, return_lse=True, backend="reference")
    close(o[0, 0].cpu(), page.O)
    torch.testing.assert_close(lse[0, 0].cpu().double(), page.L, rtol=1e-7, atol=1e-7)
    grads = attention_backward(page.dO[None, None].to(DEVICE), *inputs, backend="reference")
    for actual, expected in zip(grads, (page.dQ, page.dK, page.dV), strict=True):
        close(actual[0, 0].cpu(), expected)
    o, lse = nano_attention(*(x.float() for x in inputs))
    torch.testing.assert_close(o[0, 0].cpu().double(), page.O, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse[0, 0].cpu().double(), page.L, rtol=2e-6, atol=2e-6)


@checks("scores")
def _(page: Page) -> None:
    close(page.S, torch.einsum("id,jd->ij", page.Q, page.K) / page.D**0.5)


@checks("softmax")
def _(page: Page) -> None:
    close(page.P, torch.softmax(page.S, 1))


@checks("output")
def _(page: Page) -> None:
    close(page.O, of_inputs(page)(page.Q, page.K, page.V))


@checks("block-product")
def _(page: Page) -> None:
    assert page.Sk % page.tile
    close(page.block_product(page.P), page.P @ page.V)
    close(page.block_product(page.P[2:5]), torch.einsum("ij,jd->id", page.P[2:5], page.V))


@checks("shift")
def _(page: Page) -> None:
    close(page.P_shifted, page.P)
    c = torch.randn(page.Sq, 1, dtype=torch.float64)
    close((page.S - c).exp() / (page.S - c).exp().sum(1, keepdim=True), page.P)


@checks("log-sum-exp")
def _(page: Page) -> None:
    close(page.L, torch.logsumexp(page.S, 1))


@checks("probabilities")
def _(page: Page) -> None:
    close(page.P_from_L, torch.softmax(page.S, 1))


@checks("online-maximum")
def _(page: Page) -> None:
    m = torch.full((page.Sq, 1), -torch.inf, dtype=torch.float64)
    for tile in page.S.split((1, 5, 3), 1):
        m = page.online_maximum(m, tile)
    assert torch.equal(m, page.S.amax(1, keepdim=True))


@checks("online-denominator")
def _(page: Page) -> None:
    old, new, tile = page.S[:, :4], page.S.amax(1, keepdim=True), page.S[:, 4:]
    m = old.amax(1, keepdim=True)
    actual = page.online_denominator((old - m).exp().sum(1, keepdim=True), m, new, tile)
    close(actual.log() + new, torch.logsumexp(page.S, 1, keepdim=True))


@checks("online-numerator")
def _(page: Page) -> None:
    old, new, tile = page.S[:, :4], page.S.amax(1, keepdim=True), page.S[:, 4:]
    m = old.amax(1, keepdim=True)
    actual = page.online_numerator((old - m).exp() @ page.V[:4], m, new, tile, page.V[4:])
    close(actual / (page.S - new).exp().sum(1, keepdim=True), torch.softmax(page.S, 1) @ page.V)


@checks("finish")
def _(page: Page) -> None:
    assert page.Sk % page.tile  # the last tile is not full
    close(page.O_tiled, of_inputs(page)(page.Q, page.K, page.V))
    close(page.L_tiled, torch.logsumexp(page.S, 1))


@checks("causal")
def _(page: Page) -> None:
    # The library gives the same results as the page, also for more queries than keys.
    for q, k, v in ((page.Q, page.K, page.V), (page.K, page.Q, page.dO)):
        hidden = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)
        s = (page.scale * q @ k.T).masked_fill(hidden, -torch.inf)
        o, lse = attention(q, k, v, causal=True, return_lse=True, backend="reference")
        close(o, torch.softmax(s, 1).nan_to_num(0.0) @ v)
        torch.testing.assert_close(lse.double(), torch.logsumexp(s, 1), rtol=1e-7, atol=1e-7)
    shown = torch.ones(page.Sq, page.Sk).tril(page.Sk - page.Sq).bool()
    assert torch.equal(page.S_causal, page.S.where(shown, torch.tensor(-torch.inf).double()))


@checks("dv")
def _(page: Page) -> None:
    close(page.dV, gradients(page, of_inputs(page), page.Q, page.K, page.V)[2])


@checks("dp")
def _(page: Page) -> None:
    close(page.dP, gradients(page, lambda p: p @ page.V, page.P)[0])


@checks("softmax-jacobian")
def _(page: Page) -> None:
    for row, jacobian in zip(page.S, page.J, strict=True):
        close(jacobian, torch.autograd.functional.jacobian(lambda s: torch.softmax(s, 0), row))


@checks("softmax-gradient")
def _(page: Page) -> None:
    close(page.dS_row, gradients(page, of_scores(page), page.S)[0])


@checks("delta")
def _(page: Page) -> None:
    close(page.delta, torch.einsum("ik,ik->i", page.P, page.dP))


@checks("ds")
def _(page: Page) -> None:
    close(page.dS, gradients(page, of_scores(page), page.S)[0])


@checks("dq")
def _(page: Page) -> None:
    close(page.dQ, gradients(page, of_inputs(page), page.Q, page.K, page.V)[0])


@checks("dk")
def _(page: Page) -> None:
    close(page.dK, gradients(page, of_inputs(page), page.Q, page.K, page.V)[1])


@checks("lse-gradient")
def _(page: Page) -> None:
    def loss(s: Tensor) -> Tensor:
        return (torch.softmax(s, 1) @ page.V * page.dO).sum() + (torch.logsumexp(s, 1) * page.dL).sum()

    close(page.dS_lse, gradients(page, loss, page.S)[0])


@checks("keys-pass")
def _(page: Page) -> None:
    _, dk, dv = gradients(page, of_inputs(page), page.Q, page.K, page.V)
    blocks = [page.keys_pass(slice(j0, j0 + page.tile)) for j0 in range(0, page.Sk, page.tile)]
    close(torch.cat([block[0] for block in blocks]), dk)
    close(torch.cat([block[1] for block in blocks]), dv)


@checks("queries-pass")
def _(page: Page) -> None:
    blocks = [page.queries_pass(slice(i0, i0 + page.tile)) for i0 in range(0, page.Sq, page.tile)]
    close(torch.cat(blocks), gradients(page, of_inputs(page), page.Q, page.K, page.V)[0])


def counted(q_len: int, kv_len: int, dim: int, dtype: str) -> Case:
    return Case(backend="naive", batch=1, q_heads=1, q_len=q_len, kv_len=kv_len, head_dim=dim, dtype=dtype)


@checks("operations")
def _(page: Page) -> None:
    case = counted(6, 9, 4, "float32")
    for algorithm, products in (("flash_forward", 2), ("fused_backward", 5), ("two_pass_backward", 7)):
        assert page.operations(6, 9, 4, products) == flops(algorithm, case)


@checks("standard-traffic")
def _(page: Page) -> None:
    assert page.standard_traffic(6, 9, 4, 2) == moved_bytes("naive_forward", counted(6, 9, 4, "bfloat16"))


@checks("tiled-traffic")
def _(page: Page) -> None:
    assert page.tiled_traffic(6, 9, 4, 2) == moved_bytes("flash_forward", counted(6, 9, 4, "bfloat16"))


@checks("walked")
def _(page: Page) -> None:
    for rows in (1, 4, 6, 7):
        assert page.walked(6, 9, 4, 2, rows) == 2 * (2 * 6 * 4 + 2 * 9 * 4 * math.ceil(6 / rows))
    # If all queries fit in one tile, this is the traffic of tiled attention without its 4 bytes of lse per query.
    assert page.walked(6, 9, 4, 2, 6) == page.tiled_traffic(6, 9, 4, 2) - 4 * 6


@checks("intensity")
def _(page: Page) -> None:
    assert page.intensity(1 << 20, 64, 4, page.standard_traffic) == pytest.approx(2 * 64 / (3 * 4), rel=1e-3)
    assert page.intensity(1 << 20, 64, 2, page.standard_traffic) < 2 * 64 / (3 * 2) < 22  # as the page says
    assert page.intensity(1 << 20, 64, 4, page.tiled_traffic) == pytest.approx((1 << 20) / 4, rel=1e-2)


@checks("base-two")
def _(page: Page) -> None:
    close(page.P_base_two, torch.softmax(page.S, 1))


@checks("softcap")
def _(page: Page) -> None:
    o = attention(page.Q, page.K, page.V, softcap=page.c, backend="reference")
    close(torch.softmax(page.S_capped, 1) @ page.V, o)
    assert page.S_capped.abs().max() < page.c < page.S.abs().max()


@checks("softcap-gradient")
def _(page: Page) -> None:
    def capped(s: Tensor) -> Tensor:
        return torch.softmax(page.c * torch.tanh(s / page.c), 1) @ page.V

    close(page.dS_capped, gradients(page, capped, page.S)[0])


@checks("alibi")
def _(page: Page) -> None:
    slopes = torch.tensor([page.slope], dtype=torch.float64)
    o = attention(page.Q, page.K, page.V, alibi_slopes=slopes, backend="reference")
    close(torch.softmax(page.S_alibi, 1) @ page.V, o)


@checks("mask-gradient")
def _(page: Page) -> None:
    close(page.dM, gradients(page, lambda mask: torch.softmax(page.S + mask, 1) @ page.V, page.M)[0])


def with_sink(page: Page, s: Tensor) -> Tensor:
    """Return O with the sink `s` as one more column of scores, whose row of V is zero."""
    return torch.softmax(torch.cat([page.S, s.expand(page.Sq, 1)], 1), 1)[:, :-1] @ page.V


@checks("sink")
def _(page: Page) -> None:
    close(page.O_sink, with_sink(page, page.s))
    close(page.L_sink, torch.logsumexp(torch.cat([page.S, page.s.expand(page.Sq, 1)], 1), 1))


@checks("sink-gradient")
def _(page: Page) -> None:
    close(page.ds_sink, gradients(page, lambda s: with_sink(page, s), page.s)[0])


@checks("dropout")
def _(page: Page) -> None:
    assert set(page.Z.unique().tolist()) == {0.0, 1 / (1 - page.p)}
    close(page.O_dropped, torch.einsum("ij,ij,jd->id", torch.softmax(page.S, 1), page.Z, page.V))


@checks("dropout-gradient")
def _(page: Page) -> None:
    ds, dv = gradients(page, lambda s, v: (torch.softmax(s, 1) * page.Z) @ v, page.S, page.V)
    close(page.dS_dropped, ds)
    close(page.dV_dropped, dv)


@checks("merge")
def _(page: Page) -> None:
    close(page.O_merged, of_inputs(page)(page.Q, page.K, page.V))
    close(page.L_merged, torch.logsumexp(page.S, 1))


@checks("grouped")
def _(page: Page) -> None:
    def two_heads(k: Tensor, v: Tensor) -> Tensor:
        return of_inputs(page)(page.Q, k, v) + of_inputs(page)(page.Q2, k, v)

    dk, dv = gradients(page, two_heads, page.K, page.V)
    close(page.dK_group, dk)
    close(page.dV_group, dv)


@checks("table")
def _(page: Page) -> None:
    for n, h, i in ((0, 0, 0), (0, 1, 2), (1, 0, 3), (1, 1, 0)):
        assert torch.equal(page.query(n, h, i), page.packed[page.starts[n] + i, h])


@checks("ragged")
def _(page: Page) -> None:
    cu = torch.tensor(page.starts)
    x = page.packed
    o = attention(x, x, x, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, backend="reference")
    close(page.O_packed, o)
