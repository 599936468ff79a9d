"""A small shape for the judge, and a kernel that is wrong for this shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import flashpoint_kernels
from flashpoint_contract.judging import Report

SMALL = {"q_len": 20, "head_dim": 16}


def judged(function: Any, **more: Any) -> Report:
    return flashpoint_kernels.judge(function, quick=True, only=SMALL, dtype="float32", **more)


def late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ignore all keys from position 16 on."""
    s = q[..., :16, :] @ k[:, :, :16].mT * q.shape[-1] ** -0.5 if q.shape[2] < 17 else q @ k[:, :, :16].mT / 4
    return s.softmax(-1) @ v[:, :, :16]
