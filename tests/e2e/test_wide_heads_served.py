"""`triton` and `tiled` serve the head dimensions of multi-head latent attention; above 256, only in the forward."""

import math

import pytest
import safetensors.torch
import torch

from tests.support.messages import message, normal, post


@pytest.mark.parametrize("backend", ["triton", "tiled"])
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (576, 512)])
def test_wide_heads_are_answered_and_their_gradients_refused(gated, backend, dim, value_dim):
    t = {"q": normal(1, 2, 5, dim), "k": normal(1, 1, 9, dim, seed=1), "v": normal(1, 1, 9, value_dim, seed=2)}
    answer = post(gated.server, "/attention", message(t, backend=backend))
    assert (answer.status, answer.headers["x-backend"]) == (200, backend)
    q, k, v = (x.double() for x in t.values())
    right = (q @ k.mT / math.sqrt(dim)).softmax(-1) @ v
    torch.testing.assert_close(safetensors.torch.load(answer.body)["o"].double(), right, rtol=1e-5, atol=1e-5)
    if dim > 256:
        body = message(t | {"do": normal(1, 2, 5, value_dim, seed=3)}, backend=backend)
        refused = post(gated.server, "/attention/grad", body)
        assert refused.status == 422
