"""Requests reuse memory that contains a canary, bytes of earlier requests; no answer contains these bytes."""

import json

import numpy as np
import pytest
import torch

from tests.support.messages import JSON, message, post
from tests.support.sockets import nothing_inside, send

CANARY = np.frombuffer(b"CANARY!!", np.float32)  # as two float32: 12.890933 and 5.4667136e-19
B, H, S, D = 2, 4, 512, 64


def filled(*shape):
    """Return a tensor filled with `CANARY`."""
    return torch.from_numpy(np.resize(CANARY, shape).astype(np.float32))


def canaries(names="qkv"):
    return message({name: filled(B, H, S, D) for name in names})


def zeros(names="qkv", **more):
    return {name: torch.zeros(B, H, S, D) for name in names} | more


def checked(answer):
    """Assert that the answer has status 200 and does not contain `CANARY`; return the answer."""
    assert answer.status == 200, answer.body
    assert b"CANARY" not in answer.body
    return answer


@pytest.fixture(autouse=True)
def left_behind(server):
    """Send requests that end in different ways, so that each memory slot that a test may get contains `CANARY`."""
    body = canaries()
    for cut in (len(body) // 3, len(body) - 1):
        with send(server, body[:cut], length=len(body)):
            pass  # the client leaves during its body
    with send(server, body):
        pass  # the client leaves before its answer
    refused = message({name: filled(B, H, S, D) for name in "qkv"} | {"kv_lengths": torch.tensor([1, S + 1])})
    assert post(server, "/attention", refused).status == 422  # refused after its body was read
    assert post(server, "/attention", body).status == 200
    assert post(server, "/attention/grad", canaries(("q", "k", "v", "do"))).status == 200
    nothing_inside(server)


def test_rows_that_nobody_computes_are_zero(server):
    """The output is 0 in rows of padding, of sequences without keys, and of queries whose keys are all masked."""
    lengths = {"q_lengths": torch.tensor([1, S]), "kv_lengths": torch.tensor([S, 0])}
    answer = checked(post(server, "/attention", message(zeros(**lengths), return_lse=True)))
    assert not answer.tensors["o"].any()
    assert torch.isneginf(answer.tensors["lse"][1]).all()
    hidden = zeros(attn_mask=torch.zeros(S, S, dtype=torch.bool))
    assert not checked(post(server, "/attention", message(hidden))).tensors["o"].any()
    empty = {"q": torch.zeros(B, H, S, D), "k": torch.zeros(B, H, 0, D), "v": torch.zeros(B, H, 0, D)}
    assert not checked(post(server, "/attention", message(empty))).tensors["o"].any()


def test_gradients_of_what_nobody_sees_are_zero(server):
    lengths = {"q_lengths": torch.tensor([1, S]), "kv_lengths": torch.tensor([1, 0])}
    answer = checked(post(server, "/attention/grad", message(zeros(("q", "k", "v", "do"), **lengths))))
    for name in ("dq", "dk", "dv"):
        assert not answer.tensors[name].any()
    windowed = message(zeros(("q", "k", "v", "do")), window=[0, 0], causal=True)
    for tensor in checked(post(server, "/attention/grad", windowed)).tensors.values():
        assert not tensor.any()


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_every_backend_writes_all_of_its_answer(server, backend):
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: tensor.to(dtype) for name, tensor in zeros().items()}
        lengths = {"q_lengths": torch.tensor([3, 0]), "kv_lengths": torch.tensor([S, 7])}
        assert not checked(post(server, "/attention", message(tensors | lengths, backend=backend))).tensors["o"].any()


def test_small_answers_in_json_hold_no_more_than_they_say(server):
    request = {"q": [[0.0, 0.0]] * 3, "k": [[0.0, 0.0]], "v": [[0.0, 0.0]], "return_lse": True}
    answer = checked(post(server, "/attention", json.dumps(request).encode(), JSON))
    assert answer.json["o"] == [[0.0, 0.0]] * 3
    assert "12.8909" not in answer.body.decode()
