"""An answer with status 200 that is not a complete safetensors message with o raises ProtocolError."""

import numpy as np
import pytest

import flashpoint
from tests.support.framed import Q
from tests.support.scripted_server import message

GOOD = message({"o": Q})


@pytest.mark.parametrize(
    "answer",
    [
        {"body": b"hello", "media": "text/plain"}, {"body": GOOD, "media": "application/json"}, {"body": b""},
        {"body": b"\xff" * 64}, {"body": GOOD + b"x"}, {"body": GOOD[:-4]}, {"body": GOOD[:20]},
        {"body": message({"p": Q})}, {"body": message({})},
    ],
)  # fmt: skip
def test_a_malformed_answer_is_a_protocol_error(scripted, connect, answer):
    scripted.script.append(lambda h: h.answer(**answer))
    client = connect(scripted.url)
    with pytest.raises(flashpoint.ProtocolError):
        client.attention(Q, Q, Q)
    assert np.array_equal(client.attention(Q, Q, Q), Q)
