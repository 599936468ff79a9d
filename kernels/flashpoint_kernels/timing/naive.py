"""Attention written out, the Sq × Sk matrix in memory and everything in the inputs' dtype: what speed-ups are over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashpoint_kernels.timing.case import Case


class Naive:
    """softmax(scale·q·kᵀ)·v in plain torch operations; its gradient is autograd's."""

    def __init__(self, case: Case, device: str) -> None:
        self.group = case.q_heads // case.kv_heads
        self.scale = case.head_dim**-0.5
        self.hidden = None
        if case.causal:  # made once, as a model does
            ones = torch.ones(case.q_len, case.kv_len, dtype=torch.bool, device=device)
            self.hidden = ones.triu_(case.kv_len - case.q_len + 1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,Hq,Sq,D), k (B,Hk,Sk,D), v (B,Hk,Sk,Dv) to o (B,Hq,Sq,Dv)."""
        return self.probabilities(q, self.expanded(k)) @ self.expanded(v)

    def expanded(self, t: Tensor) -> Tensor:
        """One key/value head for each query head."""
        return t if self.group == 1 else t.repeat_interleave(self.group, 1)

    def probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        s = (q @ k.mT).mul_(self.scale)
        if self.hidden is not None:
            s.masked_fill_(self.hidden, float("-inf"))
        return torch.softmax(s, -1)


class NaiveExplicit(Naive):
    """The same with its gradient written out too, from P: dV = Pᵀ·dO, dS = P∘(dO·Vᵀ − delta), dQ = dS·K, dK = dSᵀ·Q."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = _Explicit.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return o


class _Explicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, naive: Naive, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = naive.probabilities(q, naive.expanded(k))
        o = p @ naive.expanded(v)
        ctx.naive = naive
        ctx.save_for_backward(q, k, v, p, o)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v, p, o = ctx.saved_tensors
        naive: Naive = ctx.naive
        dv = p.mT @ do
        # A row that sees no key has NaN for P, as autograd's has: naive attention knows no better.
        ds = (do @ naive.expanded(v).mT).sub_((o * do).sum(-1, keepdim=True)).mul_(p)
        dq = (ds @ naive.expanded(k)).mul_(naive.scale)
        dk = (ds.mT @ q).mul_(naive.scale)
        return None, dq, _summed(dk, naive.group), _summed(dv, naive.group)


def _summed(grad: Tensor, group: int) -> Tensor:
    """The gradient of a key/value head from those of the `group` query heads that share it."""
    return grad if group == 1 else grad.view(len(grad), -1, group, *grad.shape[2:]).sum(2)
