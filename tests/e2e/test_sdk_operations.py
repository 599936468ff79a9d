"""The client and servers that want a key, refuse, start late, and go away."""

import socket
import threading

import numpy as np
import pytest

import flashpoint

Q = np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float32)


def test_a_key_is_sent_and_a_missing_or_wrong_one_is_an_error(start_server):
    server = start_server(api_keys="secret")
    with flashpoint.Client(server.url, api_key="secret") as client:
        assert client.attention(Q, Q, Q).shape == Q.shape
        assert client.info()["backends"]
    for wrong in (None, "guess"):
        with flashpoint.Client(server.url, api_key=wrong) as client:
            with pytest.raises(flashpoint.AuthenticationError) as info:
                client.attention(Q, Q, Q)
            assert info.value.status in (401, 403)
            assert client.live()


def test_a_body_over_the_limit_is_refused_while_it_is_sent(start_server):
    server = start_server(body_limit=1 << 20)
    big = np.zeros((1, 8, 8192, 64), np.float32)
    with flashpoint.Client(server.url) as client:
        with pytest.raises(flashpoint.TooLargeError) as info:
            client.attention(big, big, big)
        assert (info.value.status, bool(info.value.request_id)) == (413, True)
        assert client.attention(Q, Q, Q).shape == Q.shape


def test_a_call_waits_for_a_server_that_is_still_starting(start_server):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = {}

    def call():
        with flashpoint.Client(f"http://127.0.0.1:{port}", retries=20) as client:
            found["o"], found["meta"] = client.attention(Q, Q, Q, with_meta=True)

    caller = threading.Thread(target=call)
    caller.start()
    start_server(port=port, ready=False)
    caller.join(60)
    assert found["o"].shape == Q.shape
    assert found["meta"].retries > 0
