"""Helpers that read the reports of `verify`, and torch's attention as an independent kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashpoint_kernels import verify
from flashpoint_kernels.verification import Progress, Verification


def errors_of(report: Verification) -> dict[str, bool]:
    return {t.name: t.ok for t in report.tensors}


def sdpa(t: dict[str, torch.Tensor], backend: SDPBackend, **options: Any) -> dict[str, torch.Tensor]:
    """Return torch's attention and its gradients: an independent kernel."""
    leaves = [t[name].clone().requires_grad_() for name in ("q", "k", "v")]
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(*leaves, **options)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, t["do"])), strict=True))


def told(t: dict[str, torch.Tensor], **how: Any) -> tuple[Verification, list[tuple[int, int, str, str]]]:
    events: list[Progress] = []
    report = verify(t, progress=events.append, **how)
    return report, [(at.done, at.total, at.stage, at.direction) for at in events]
