"""A call sends its tensors and the options that are set. If one is wrong, it sends nothing, and the error names it."""

import numpy as np
import pytest

import flashpoint
from flashpoint_contract.wire import MEDIA_TYPE, decode_options, head_size, parse_head
from tests.support.framed import Q
from tests.support.scripted_server import message


def sent(server, index=-1):
    """Return (tensors, options) of the request with this index. tensors: {name: (dtype, shape, bytes)}."""
    body = server.requests[index][3]
    head = parse_head(body[: head_size(body[:8])])
    tensors = {t.name: (t.dtype, t.shape, body[head.size + t.start : head.size + t.stop]) for t in head.tensors}
    return tensors, decode_options(head.metadata)


def test_a_call_sends_the_tensors_and_only_the_options_that_were_set(scripted, connect):
    client = connect(scripted.url, api_key="k", timeout=300)
    client.attention(
        Q, Q[:, ::2], Q.transpose(0, 1, 3, 2), causal=True, window=(3, 0), scale=np.float32(2), layout="bshd",
        backend="auto",         q_lengths=[3], attn_mask=np.ones((3, 3), np.bool_), priority=7, request_id="mine",
    )  # fmt: skip
    tensors, options = sent(scripted)
    assert options == {"causal": True, "window": [3, 0], "scale": 2.0, "layout": "bshd"}
    assert tensors["q"] == ("float32", (1, 2, 3, 4), Q.tobytes())
    assert tensors["k"] == ("float32", (1, 1, 3, 4), Q[:, ::2].tobytes())
    assert tensors["v"] == ("float32", (1, 2, 4, 3), np.ascontiguousarray(Q.transpose(0, 1, 3, 2)).tobytes())
    assert tensors["q_lengths"] == ("int64", (1,), np.array([3]).tobytes())
    assert tensors["attn_mask"][:2] == ("bool", (3, 3))
    method, path, headers, body = scripted.requests[0]
    assert (method, path, headers["Content-Type"], headers["Accept"]) == ("POST", "/attention", MEDIA_TYPE, MEDIA_TYPE)
    assert headers["Authorization"] == "Bearer k"
    assert (headers["X-Priority"], headers["X-Request-Id"]) == ("7", "mine")
    assert int(headers["Content-Length"]) == len(body)
    assert 0 < int(headers["X-Timeout-Ms"]) <= 300_000


def test_gradients_come_in_the_order_that_was_asked(scripted, connect):
    answer = {"dk": Q + 1, "dsinks": Q[0, 0, 0], "dq": Q}
    scripted.script.append(lambda h: h.answer(body=message(answer)))
    actual = connect(scripted.url).attention_grad(Q, Q, Q, Q, o=Q, lse=Q[..., 0], grads=["dq", "dsinks", "dk"])
    assert [t.tolist() for t in actual] == [answer[n].tolist() for n in ("dq", "dsinks", "dk")]
    tensors, options = sent(scripted)
    assert tensors.keys() == {"q", "k", "v", "do", "o", "lse"}
    assert options == {"grads": ["dq", "dsinks", "dk"]}
    assert scripted.requests[0][1] == "/attention/grad"


BAD = [
    ("q", {"q": [[1.0]]}), ("q", {"q": None}), ("k", {"k": np.zeros(3, np.complex64)}), ("v", {"v": "x"}),
    ("kv_lengths", {"kv_lengths": ["a"]}),
    ("kv_lengths", {"kv_lengths": 3}), ("cu_seqlens_q", {"cu_seqlens_q": [1 << 80]}),
    ("casual", {"casual": True}), ("causal", {"causal": "yes"}),
    ("window", {"window": (-3, 0)}), ("grads", {"grads": ["dq"]}), ("o", {"o": Q}), ("priority", {"priority": 10}),
    ("request_id", {"request_id": "a\r\nb"}), ("timeout", {"timeout": 0}), ("timeout", {"timeout": "1"}),
    ("timeout", {"timeout": 1e9}), ("timeout", {"timeout": 10**400}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "keywords"), BAD, ids=[f"{f}-{i}" for i, (f, _) in enumerate(BAD)])
def test_bad_input_is_refused_here_and_named(scripted, connect, field, keywords):
    client = connect(scripted.url)
    with pytest.raises(flashpoint.InvalidInputError) as info:
        client.attention(**{"q": Q, "k": Q, "v": Q, **keywords})
    assert [error.field for error in info.value.errors] == [field]
    assert info.value.status is None
    assert not scripted.requests


def test_return_lse_is_not_of_a_gradient(scripted, connect):
    with pytest.raises(flashpoint.InvalidInputError, match="return_lse"):
        connect(scripted.url).attention_grad(Q, Q, Q, Q, return_lse=True)
