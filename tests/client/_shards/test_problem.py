"""Calls that cannot be sharded or are invalid fail before anything is sent, and the error names the field."""

import numpy as np
import pytest

import flashpoint
from flashpoint import sharded

X = np.zeros((2, 4, 6, 8), np.float32)
T = np.zeros((6, 4, 8), np.float32)
CU = [0, 2, 6]


@pytest.fixture
def clients():
    """Yield a list that contains the same client twice. No server listens at its URL."""
    with flashpoint.Client("http://127.0.0.1:9") as client:
        yield [client, client]


@pytest.mark.parametrize(
    ("field", "tensors", "keywords"),
    [
        ("dropout_p", (X, X, X), {"dropout_p": 0.1}),
        ("parts", (X, X, X), {"parts": (0, 1)}),
        ("parts", (X, X, X), {"parts": (1, 2, 3)}),
        ("parts", (X, X, X), {"parts": 3}),
        ("timeout", (X, X, X), {"timeout": -1}),
        ("do", (X, X, X), {"do": X}),
        ("windows", (X, X, X), {"windows": (1, 1)}),
        ("window", (X, X, X), {"window": (-2, 1)}),
        ("q", (X.astype(np.int32), X, X), {}),
        ("q", (X[0, 0, 0], X, X), {}),
        ("q", (X, X[:, :3], X[:, :3]), {}),
        ("k", (X, X[..., :4], X), {}),
        ("k", (X, X[0], X), {}),
        ("k", (X, X.astype(np.float16), X), {}),
        ("v", (X, X, X[:, :, :3]), {}),
        ("sinks", (X, X, X), {"sinks": np.zeros(3, np.float32)}),
        ("alibi_slopes", (X, X, X), {"alibi_slopes": np.zeros((4, 2), np.float32)}),
        ("attn_mask", (X, X, X), {"attn_mask": np.zeros((5, 6), np.float32)}),
        ("attn_mask", (T, T, T), {"layout": "thd", "cu_seqlens_q": CU, "cu_seqlens_k": CU, "attn_mask": X[0, 0]}),
        ("kv_lengths", (X, X, X), {"kv_lengths": [3, 7]}),
        ("kv_lengths", (X, X, X), {"kv_lengths": [3]}),
        ("q_lengths", (X, X, X), {"q_lengths": np.zeros(2, np.float32)}),
        ("cu_seqlens_q", (X, X, X), {"cu_seqlens_q": CU}),
        ("cu_seqlens_q", (T, T, T), {"layout": "thd"}),
        ("cu_seqlens_k", (T, T, T), {"layout": "thd", "cu_seqlens_q": CU, "cu_seqlens_k": [0, 5, 4]}),
    ],
)
def test_a_field_that_is_wrong_is_named(clients, field, tensors, keywords):
    with pytest.raises(flashpoint.InvalidInputError) as info:
        sharded.attention(clients, *tensors, **keywords)
    assert next(error.field for error in info.value.errors) == field


@pytest.mark.parametrize(
    ("field", "keywords"),
    [
        ("return_lse", {"return_lse": True}),
        ("lse", {"o": X}),
        ("o", {"lse": X[..., 0]}),
        ("dlse", {"dlse": X}),
        ("grads", {"grads": ["dsinks"]}),
        ("grads", {"grads": ["dattn_mask"], "attn_mask": np.ones((6, 6), bool)}),
        ("parts", {"backend": "reference", "parts": (1, 2)}),
        ("sinks", {"backend": "reference", "sinks": np.zeros(4, np.float32)}),
    ],
)
def test_a_field_of_a_gradient_that_is_wrong_is_named(clients, field, keywords):
    with pytest.raises(flashpoint.InvalidInputError) as info:
        sharded.attention_grad(clients, X, X, X, X, **keywords)
    assert next(error.field for error in info.value.errors) == field


def test_clients_are_a_list_of_the_right_kind(clients):
    for wrong in ((), clients[0], ["http://localhost:8000"]):
        with pytest.raises(flashpoint.InvalidInputError, match="clients"):
            sharded.attention(wrong, X, X, X)
