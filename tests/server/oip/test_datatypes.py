"""Attention and gradients are right for every datatype of the Open Inference Protocol that is served."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.oip.message import infer
from tests.support.oip.problem import BOUNDS, GRAD, near, problem, truth


@pytest.mark.parametrize("dtype", BOUNDS)
def test_attention_in_every_datatype(url, dtype):
    reply = infer(url, "attention", problem(dtype), parameters={"causal": True, "binary_data_output": True})
    assert list(reply.tensors) == ["o"]
    assert reply.tensors["o"].dtype == dtype
    near(reply.tensors["o"], truth(problem(dtype), causal=True)["o"], BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_gradients_in_every_datatype(url, dtype):
    tensors = problem(dtype, GRAD)
    reply = infer(url, "attention_grad", tensors, parameters={"causal": True, "binary_data_output": True})
    expected = truth(tensors, causal=True)
    assert list(reply.tensors) == ["dq", "dk", "dv"]
    for name, t in reply.tensors.items():
        assert t.dtype == dtype
        near(t, expected[name], 2 * BOUNDS[dtype])
