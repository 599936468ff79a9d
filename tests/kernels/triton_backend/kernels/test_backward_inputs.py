"""The gradient of a mask has the same bits in a launch of several requests as in a launch of its request alone."""

import random

import pytest
import torch

from flashpoint_kernels import Options
from tests.conftest import DEVICE
from tests.support.kernels.mixed_requests import drawn_request, run_backward, run_forward


@pytest.mark.slow
def test_a_mask_gradient_summed_over_the_batch_equals_itself_alone() -> None:
    rng = random.Random(3)
    requests = []
    for n in range(6):
        tensors = drawn_request(rng, n, {"layout": "bhsd"})
        q, k = tensors["q"], tensors["k"]
        shapes = [(1, 1, q.shape[2], k.shape[2]), (q.shape[0], 1, 1, k.shape[2]), (1, q.shape[1], 1, 1)]
        shape = shapes[n % 3]
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(DEVICE)
        options = Options(return_lse=True, grads=("dq", "dattn_mask"))
        tensors["attn_mask"] = mask
        (answer,) = run_forward([(tensors, options)])
        requests.append(({**tensors, **answer, "do": torch.ones_like(answer["o"])}, options))
    for request, answer in zip(requests, run_backward(requests), strict=True):
        (alone,) = run_backward([request])
        assert all(torch.equal(answer[name], alone[name]) for name in answer)
        assert not any(t.isnan().any() for t in answer.values())
