"""`Meta` has the backend, seed, batch size, request id, timings and retries of a call."""

import numpy as np

import flashpoint
from tests.support.framed import Q
from tests.support.scripted_server import message


def test_meta_says_how_it_was_answered(scripted, connect, delays):
    def answer(handler):
        handler.answer(
            body=message({"o": Q}, {"backend": "tiled", "dropout_seed": "9007199254740991"}),
            X_Request_Id="abc", X_Backend="tiled", X_Batch_Size="3",
            Server_Timing='decode;dur=1.5, queue;desc="x";dur=0, compute;dur=20.25, encode;dur=.5',
        )  # fmt: skip

    scripted.script.extend([lambda h: h.problem(503), answer])
    o, meta = connect(scripted.url).attention(Q, Q, Q, with_meta=True)
    assert np.array_equal(o, Q)
    timings = {"decode": 1.5, "queue": 0.0, "compute": 20.25, "encode": 0.5}
    assert meta == flashpoint.Meta("tiled", 9007199254740991, 3, "abc", timings, retries=1)
