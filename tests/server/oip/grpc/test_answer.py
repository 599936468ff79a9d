"""A gRPC answer has its tensors as raw bytes or as numbers, as the request asks."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.oip.grpc_calls import request
from tests.support.oip.message import raw
from tests.support.oip.problem import problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_taken_and_given_and_are_the_same_as_bytes(caller, dtype):
    tensors = problem(dtype) | {
        "attn_mask": torch.ones(24, 24, dtype=torch.bool).tril(),
        "kv_lengths": torch.tensor([20]),
    }
    outputs = ("lse", "o")
    expected = caller.infer(request(tensors, outputs=outputs)).bits
    numbers = caller.infer(request(tensors, typed=True, outputs=outputs)).numbers
    dtypes = {"o": dtype, "lse": torch.float32}
    assert {name: raw(torch.tensor(numbers[name], dtype=dtypes[name])) for name in outputs} == expected
    assert caller.infer(request(tensors, typed=True, outputs=outputs, binary_data_output=True)).bits == expected
    assert caller.infer(request(tensors, outputs=outputs, binary_data_output=False)).numbers == numbers


def test_long_numbers_are_read_and_written_too(caller):
    tensors = {name: torch.linspace(0, 1, 4 * 128 * 32).reshape(4, 128, 32) for name in "qkv"}
    expected = caller.infer(request(tensors)).bits["o"]
    numbers = caller.infer(request(tensors, typed=True)).numbers["o"]
    assert raw(torch.tensor(numbers)) == expected


def test_empty_tensors_have_empty_answers(caller):
    tensors = {"q": torch.empty(0, 4), "k": torch.ones(3, 4), "v": torch.ones(3, 2)}
    for typed in (False, True):
        answer = caller.infer(request(tensors, typed=typed, binary_data_output=True))
        assert answer.bits == {"o": b""}
        assert list(answer.message.outputs[0].shape) == [0, 2]
