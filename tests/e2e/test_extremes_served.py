"""For the extreme values of docs/numerics.md, answers over HTTP have the bits of the backend in this process."""

import json

import pytest
import torch

from tests.support.kernels.extremes import CASES
from tests.support.kernels.solving import backward, forward
from tests.support.messages import JSON, message, post


def bits(tensors):
    return {name: t.contiguous().view(torch.uint8).tolist() for name, t in tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_an_edge_is_answered_as_here(server, name):
    """NaN, infinities, subnormal numbers and the sign of zero survive the request and the answer."""
    t = CASES[name].tensors("float32" if "float32" in CASES[name].dtypes else "float16")
    inputs = {n: x for n, x in t.items() if n != "do"}
    answer = post(server, "/attention", message(inputs, backend="cpu", return_lse=True))
    assert bits(answer.tensors) == bits(forward("cpu", t))
    answer = post(server, "/attention/grad", message(t, backend="cpu"))
    assert bits(answer.tensors) == bits(backward("cpu", t))


def test_json_has_words_for_what_it_has_no_numbers_for(server):
    """JSON has NaN and infinities as strings. The output of a query with one key is the value of this key."""
    value = ["NaN", "Infinity", "-Infinity", 0.0, 1e-45, -3.4028235e38]
    body = {"q": [[0]], "k": [[0]], "v": [value], "backend": "reference"}
    answer = post(server, "/attention", json.dumps(body).encode(), JSON)
    assert answer.status == 200, answer.body
    assert answer.json["o"] == [value]
