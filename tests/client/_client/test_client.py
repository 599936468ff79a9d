"""A client reuses its connections, may be shared by threads, and accepts a transport of httpx."""

import threading

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint_contract.wire import MEDIA_TYPE
from tests.support.framed import Q
from tests.support.scripted_server import message


def test_one_connection_serves_one_caller(scripted, connect):
    client = connect(scripted.url)
    for _ in range(5):
        client.attention(Q, Q, Q)
    assert scripted.connections == 1


def test_a_client_is_shared_by_threads(scripted):
    with flashpoint.Client(scripted.url) as client:
        results = {}

        def work(i):
            results[i] = [client.attention(Q + i, Q, Q) for _ in range(5)]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(np.array_equal(o, Q + i) for i in range(8) for o in results[i])
    assert scripted.connections <= 8


def test_lookups(scripted, connect):
    client = connect(scripted.url)
    scripted.script.extend([lambda h: h.answer(body=b'{"version": "1"}', media="application/json"),
                            lambda h: h.answer(body=b"{}", media="application/json"), lambda h: h.problem(503),
                            lambda h: h.problem(401)])  # fmt: skip
    assert client.info() == {"version": "1"}
    assert client.live()
    assert not client.ready()
    with pytest.raises(flashpoint.AuthenticationError):
        client.ready()
    assert [path for _, path, *_ in scripted.requests] == ["/info", "/health/live", "/health/ready", "/health/ready"]


def test_a_transport_can_be_put_in():
    seen = []

    def handle(request):
        seen.append(b"".join(request.stream))
        return httpx.Response(200, headers={"content-type": MEDIA_TYPE}, content=message({"o": Q}))

    with flashpoint.Client("http://anywhere", transport=httpx.MockTransport(handle)) as client:
        assert np.array_equal(client.attention(Q, Q, Q), Q)
    assert seen[0].endswith(Q.tobytes() * 3)


def test_a_balancers_cookie_and_the_addresss_path_go_with_every_call(scripted, connect):
    scripted.script.append(lambda handler: handler.answer(body=message({"o": Q}), Set_Cookie="replica=7; Path=/"))
    client = connect(f"{scripted.url}/behind/this")
    for _ in range(2):
        client.attention(Q, Q, Q)
    (_, path, first, _), (_, _, second, _) = scripted.requests
    assert (path, first["Host"]) == ("/behind/this/attention", f"127.0.0.1:{scripted.server_port}")
    assert (first["Cookie"], second["Cookie"]) == (None, "replica=7")
