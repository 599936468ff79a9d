"""torch tensors reach the server and come back bit for bit. Complex, sparse and meta tensors are refused by name."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
import flashpoint.torch
from tests.support.scripted_server import message

Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_come_back_bit_for_bit(scripted, connect, dtype):
    bits = np.random.default_rng(0).integers(0, 256, (2, 1, 5, 3, 8), np.uint8)
    array = bits.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)[..., 0].copy()
    tensor = torch.from_numpy(array.view(np.uint8)).view(getattr(torch, dtype))
    o = connect(scripted.url).attention(tensor.transpose(0, 2), tensor, tensor)
    assert o.dtype == tensor.dtype
    assert o.shape == tensor.transpose(0, 2).shape
    assert torch.equal(o.view(torch.uint8), tensor.transpose(0, 2).contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 16), (0, 4)])
def test_empty_torch_tensors_travel(scripted, connect, shape, dtype):
    q = torch.zeros(shape, dtype=dtype)
    o = connect(scripted.url).attention(q, q, q)
    assert (o.shape, o.dtype) == (shape, dtype)


def test_gradients_of_no_keys_come_back(scripted):
    q, k = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 0, 4, requires_grad=True)
    forward = message({"o": np.zeros((1, 2, 3, 4), np.float32), "lse": np.full((1, 2, 3), -np.inf, np.float32)})
    empty = np.zeros((1, 2, 0, 4), np.float32)
    backward = message({"dk": empty, "dv": empty})
    scripted.script.extend([lambda h: h.answer(body=forward), lambda h: h.answer(body=backward)])
    with flashpoint.Client(scripted.url) as client:
        flashpoint.torch.attention(q, k, k, client=client).sum().backward()
    assert k.grad.shape == k.shape


BAD = [
    ("v", torch.zeros(3, dtype=torch.complex64)),
    ("k", torch.eye(3).to_sparse()),
    ("k", torch.zeros(3, device="meta")),
]


@pytest.mark.parametrize(("field", "tensor"), BAD, ids=["complex", "sparse", "meta"])
def test_a_tensor_that_cannot_be_sent_is_refused_and_named(scripted, connect, field, tensor):
    with pytest.raises(flashpoint.InvalidInputError) as info:
        connect(scripted.url).attention(**{"q": Q, "k": Q, "v": Q, field: tensor})
    assert [error.field for error in info.value.errors] == [field]
    assert info.value.status is None
    assert not scripted.requests
