"""A small shape for the judge, a kernel that is wrong for it, and a function that names the causes of wrong answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import flashpoint_kernels
from flashpoint_contract.judging import Report
from flashpoint_contract.options import Options
from flashpoint_kernels import verification

SMALL = {"q_len": 20, "head_dim": 16}


def judged(function: Any, **more: Any) -> Report:
    given: dict[str, Any] = {"quick": True, "only": SMALL, "dtype": "float32", "seed": 0}
    return flashpoint_kernels.judge(function, **given | more)


def late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ignore all keys from position 16 on."""
    s = q[..., :16, :] @ k[:, :, :16].mT * q.shape[-1] ** -0.5 if q.shape[2] < 17 else q @ k[:, :, :16].mT / 4
    return s.softmax(-1) @ v[:, :, :16]


def causes(tensors: Mapping[str, Tensor], options: Options, **answers: Tensor) -> str:
    """Return the codes and the texts of the causes that the judge finds for these wrong answers."""
    report = verification.verify(tensors, options, answers=answers)
    assert not report.ok
    return " | ".join(f"{cause.code}: {cause.text}" for cause in report.causes)


def tensors(
    q_heads: int = 4, kv_heads: int = 2, q_len: int = 20, kv_len: int = 28, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return random q, k and v of two sequences."""
    sizes = ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return {name: torch.randn(2, h, n, 16, dtype=dtype) for name, (h, n) in zip("qkv", sizes, strict=True)}
