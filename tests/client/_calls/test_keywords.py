"""A call with a wrong keyword is refused before anything is sent; the error suggests the name that was meant."""

import numpy as np
import pytest

import flashpoint

Q = np.zeros((1, 2, 4, 8), np.float32)
# Keywords of `Client.attention`, and the error message.
CALLS = [
    ({"is_causal": True}, "is_causal: unknown option or tensor; did you mean causal?"),
    ({"casual": True}, "casual: unknown option or tensor; did you mean causal?"),
    ({"sm_scale": 1.0}, "sm_scale: unknown option or tensor; did you mean scale?"),
    ({"softmax_scale": 1.0}, "softmax_scale: unknown option or tensor; did you mean scale?"),
    ({"dropout": 0.1}, "dropout: unknown option or tensor; did you mean dropout_p?"),
    ({"mask": Q}, "mask: unknown option or tensor; did you mean attn_mask?"),
    ({"window_size": (4, 0)}, "window_size: unknown option or tensor; did you mean window?"),
    ({"causal": 1}, "causal: must be true or false"),
    ({"causal": "yes"}, "causal: must be true or false"),
    ({"layout": "bhds"}, "layout: must be 'bhsd', 'bshd' or 'thd'"),
    ({"scale": "big"}, "scale: must be a number"),
    ({"window": 3}, "window: must be two integers [left, right], each -1 (no bound) or 0 to 2^30"),
    ({"window": (3,)}, "window: item 2 is missing"),
    ({"dropout_p": 1.5}, "dropout_p: must be less than 1"),
    ({"backend": "cuda"}, "backend: must be 'auto', 'triton', 'cpu', 'torch', 'tiled' or 'reference'"),
    ({"grads": ["dq"]}, "grads: is not taken by this call"),
    ({"at": [3]}, "at: is taken only with caches"),
    ({"caches": "c1"}, "caches: must be a list, with one cache for each sequence of q"),
    ({"save": 1}, "save: must be True or False"),
    ({"priority": 10}, "priority: must be an integer from 0 to 9"),
    ({"timeout": -1}, "timeout: must be a number of seconds above 0"),
    ({"request_id": ""}, "request_id: must be up to 128 letters, digits and ._:/+=@~-"),
    ({"request_id": "two words"}, "request_id: must be up to 128 letters, digits and ._:/+=@~-"),
    ({"request_id": "a" * 129}, "request_id: must be up to 128 letters, digits and ._:/+=@~-"),
    ({"attn_mask": [[True]]}, "attn_mask: must be a numpy array or a torch tensor, not list"),
    ({"sinks": Q.astype(complex)}, "sinks: dtype complex128 cannot be sent"),
]


@pytest.mark.parametrize(("keywords", "message"), CALLS, ids=[" ".join(row[0]) for row in CALLS])
def test_a_mistake_in_a_call_is_refused_before_anything_is_sent(keywords, message):
    with flashpoint.Client("http://127.0.0.1:9") as client, pytest.raises(flashpoint.InvalidInputError) as error:
        client.attention(Q, Q, Q, **keywords)
    assert message in str(error.value)


def test_a_call_without_v_says_what_is_missing():
    with flashpoint.Client("http://127.0.0.1:9") as client, pytest.raises(flashpoint.InvalidInputError) as error:
        client.attention(Q, Q)
    assert str(error.value) == "v: is missing"


def test_an_unknown_keyword_is_compared_with_those_of_its_call():
    with flashpoint.Client("http://127.0.0.1:9") as client, pytest.raises(flashpoint.InvalidInputError) as error:
        client.benchmark(shapes=[{"q_len": 8, "head_dim": 8}], backend=["torch"])
    assert str(error.value) == "backend: unknown option or tensor; did you mean backends?"
