"""The library, the clients and `flashpoint.torch` accept NumPy and torch numbers as options, and lists as lengths."""

from functools import partial

import numpy as np
import pytest
import torch

import flashpoint
import flashpoint.torch
from flashpoint_kernels import ProblemError, attention, attention_backward
from flashpoint_kernels.modules import FlashAttention
from tests.support.oracle import tensors

X = tensors(2, 2, 8, 16, n=1)[0]
REFUSED = (ProblemError, flashpoint.InvalidInputError)


@pytest.fixture(scope="module", params=["library", "client", "torch", "sharded"])
def call(request, server):
    if request.param == "library":
        yield attention
        return
    with flashpoint.Client(server.url) as client:
        yield {
            "client": client.attention,
            "torch": partial(flashpoint.torch.attention, client=client),
            "sharded": partial(flashpoint.sharded.attention, [client]),
        }[request.param]


WINDOWS = ([3, 0], np.array([3, 0]), torch.tensor([3, 0]), (np.int32(3), torch.tensor(0)), (torch.tensor(3), 0))
SCALES = (np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor(0.25).bfloat16())


def test_a_window_and_a_scale_of_any_library(call):
    expected = call(X, X, X, window=(3, 0), scale=0.25)
    assert all(torch.equal(call(X, X, X, window=window, scale=0.25), expected) for window in WINDOWS)
    assert all(torch.equal(call(X, X, X, window=(3, 0), scale=scale), expected) for scale in SCALES)
    assert torch.equal(call(X, X, X, window=None), call(X, X, X))


def test_an_option_that_is_changed_in_place_is_read_anew(call):
    scale = torch.tensor(0.25)
    call(X, X, X, scale=scale)
    scale.mul_(2)
    assert torch.equal(call(X, X, X, scale=scale), call(X, X, X, scale=0.5))


def test_lengths_and_offsets_as_lists_arrays_and_both_integers(call):
    lengths = [[5, 8], (5, 8), np.array([5, 8]), np.array([5, 8], np.int32), torch.tensor([5, 8]).int()]
    expected = call(X, X, X, kv_lengths=torch.tensor([5, 8]), q_lengths=torch.tensor([5, 8]))
    assert all(torch.equal(call(X, X, X, kv_lengths=each, q_lengths=each), expected) for each in lengths)
    packed = X.flatten(0, 1)
    starts = [[0, 1, 4], np.array([0, 1, 4], np.int32), torch.tensor([0, 1, 4])]
    results = [call(packed, packed, packed, layout="thd", cu_seqlens_q=each, cu_seqlens_k=each) for each in starts]
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize(
    "wrong",
    [{"window": 3}, {"window": (1,)}, {"window": (1.5, 0)}, {"window": np.array([[1, 2]])}, {"scale": torch.ones(2)},
     {"scale": np.array(np.nan)}, {"scale": torch.tensor(True)}, {"kv_lengths": [1.5, 2]}, {"kv_lengths": ["a", 1]},
     {"kv_lengths": [1 << 70, 2]}, {"kv_lengths": 3}, {"kv_lengths": [[1, 2], [3, 4]]}],
    ids=str,
)  # fmt: skip
def test_what_is_no_such_number_is_refused_by_name(call, wrong):
    with pytest.raises(REFUSED, match=next(iter(wrong))):
        call(X, X, X, **wrong)


def test_a_scale_that_requires_a_gradient_is_refused():
    """A scale that requires a gradient is refused, because options become Python numbers and lose gradients."""
    with pytest.raises(ProblemError, match="scale: has no gradient"):
        attention(X, X, X, scale=torch.tensor(0.25, requires_grad=True))


def test_pages_by_lists_and_64_bits():
    k = tensors(6, 2, 4, 16, n=1)[0]
    pages = [[0, 1], [2, 5]]
    tables = [torch.tensor(pages).int(), pages, np.array(pages), torch.tensor(pages)]
    actual = [attention(X, k, k, block_table=table, kv_lengths=[8, 5]) for table in tables]
    assert all(torch.equal(each, actual[0]) for each in actual)
    with pytest.raises(ProblemError, match=r"block_table: .* page"):
        attention(X, k, k, block_table=[[0, 1], [2, (1 << 32) + 5]], kv_lengths=[8, 5])
    unread = attention(X, k, k, block_table=[[0, 1], [2, 1 << 40]], kv_lengths=[8, 3])
    assert torch.equal(unread, attention(X, k, k, block_table=[[0, 1], [2, 0]], kv_lengths=[8, 3]))


def test_gradients_and_modules_take_them_too():
    actual = [attention_backward(X, X, X, X, kv_lengths=n, window=w, scale=s)
             for n, w, s in (([5, 8], None, None), (torch.tensor([5, 8]), (-1, -1), torch.tensor(0.25)))]  # fmt: skip
    assert all(map(torch.equal, *actual))
    module, x = FlashAttention(16, heads=2, window=None), X[:, 0]
    assert torch.equal(module(x, [5, 8]), module(x, torch.tensor([5, 8])))
