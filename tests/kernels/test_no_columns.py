"""A head dimension of 0 gives scores of 0 before the mask, as in SDPA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashpoint_kernels import attention
from tests.support.kernels.solving import normal

SHAPES = {
    "no D": ((2, 4, 5, 0), (2, 2, 7, 0), (2, 2, 7, 4)),
    "no Dv": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 0)),
    "neither": ((2, 4, 5, 0), (2, 2, 7, 0), (2, 2, 7, 0)),
    "no key": ((2, 4, 5, 0), (2, 2, 0, 0), (2, 2, 0, 4)),
    "no sequence": ((0, 4, 5, 0), (0, 2, 7, 0), (0, 2, 7, 4)),
    "one head": ((5, 0), (7, 0), (7, 4)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True, "scale": 0.3}, "softcap": {"softcap": 2.0}, "mask": {"attn_mask": (5, 7)},
    "sinks": {"sinks": (4,)},
}  # fmt: skip
BACKENDS = ["auto", "cpu", "tiled", "reference", pytest.param("triton", marks=pytest.mark.slow)]


def answers(shapes: Any, options: dict[str, Any], backend: str, min_dim: int) -> list[torch.Tensor]:
    """Return o, lse and all gradients, with head dimensions below `min_dim` padded by zeros."""
    inputs = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    inputs = [torch.nn.functional.pad(t, (0, max(0, min_dim - t.shape[-1]))).requires_grad_() for t in inputs]
    keywords = dict(options)
    for name in ("attn_mask", "sinks"):
        if name in keywords:
            keywords[name] = normal(*keywords[name], seed=5).requires_grad_()
            inputs.append(keywords[name])
    o, lse = attention(*inputs[:3], **keywords, return_lse=True, backend=backend)
    loss = o.square().sum() + lse[lse.isfinite()].square().sum()
    return [o, lse, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_no_columns_are_columns_of_zeros(shapes: Any, backend: str) -> None:
    for name, options in OPTIONS.items():
        if (name == "mask" and shapes[1][-2] != 7) or (name == "sinks" and len(shapes[0]) == 2):
            continue
        expected = answers(shapes, {"scale": 1.0, **options} if shapes[0][-1] == 0 else options, "reference", 1)
        for actual, wanted in zip(answers(shapes, options, backend, 0), expected, strict=True):
            part = wanted if actual.shape == wanted.shape else wanted[..., : actual.shape[-1]]
            torch.testing.assert_close(actual, part, rtol=1e-5, atol=1e-5)


def test_they_are_those_of_sdpa() -> None:
    for shapes in SHAPES.values():
        q, k, v = (normal(*shape, seed=n) for n, shape in enumerate(shapes))
        if q.ndim == 4:
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            torch.testing.assert_close(attention(q, k, v), expected, rtol=1e-5, atol=1e-5)
