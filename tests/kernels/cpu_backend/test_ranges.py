"""The kernels in C are right where products q·k exceed float32's range, but a tiny scale makes moderate scores."""

from __future__ import annotations

import pytest
import torch

from flashpoint_kernels import attention, attention_backward, native
from tests.support.kernels.solving import qkv

pytestmark = pytest.mark.skipif(native.library() is None, reason="without the kernels in C")
OPTIONS: list[dict[str, object]] = [{}, {"causal": True, "layout": "bshd"}, {"softcap": 3.0}, {"backend": "cpu"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_tiny_scale_has_the_answers_of_smaller_tensors(
    dtype: torch.dtype, sign: int, options: dict[str, object]
) -> None:
    t = qkv(2, 4, 33, 33, 16, kv_heads=4, dtype=dtype)
    size = 2.0**66  # q·k is about 2^134, beyond float32
    large = t | {"q": t["q"] * size, "k": t["k"] * size}
    usual, tiny = sign * 0.25, sign * 0.25 * 2.0**-132
    answers = []
    for given, scale, factor in ((t, usual, 1.0), (large, tiny, size)):
        inputs = {n: given[n].clone().requires_grad_() for n in "qkv"}
        o, lse = attention(**inputs, scale=scale, return_lse=True, **options)  # type: ignore[arg-type]
        o.backward(given["do"])
        dq, dk, dv = attention_backward(**given, scale=scale, **options)  # type: ignore[arg-type]
        for name, gradient in zip("qkv", (dq, dk, dv), strict=True):
            assert torch.equal(gradient, inputs[name].grad)
        answers.append([o.float(), lse, dq.float() * factor, dk.float() * factor, dv.float()])
    for x, y in zip(*answers, strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
