"""Both clients work over a socket with a scripted server."""

import asyncio
import inspect
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import ml_dtypes
import numpy as np
import pytest

import flashpoint
from flashpoint import sharded
from flashpoint._calls.service import lookup
from flashpoint._http import exchange, transport
from flashpoint_contract.wire import MEDIA_TYPE, decode_options, head_size, parse_head
from tests.support.scripted_server import message

Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
PATIENCE = 60  # seconds; only ends a hang


def sent(server, index=-1):
    """Return (tensor name → (dtype, shape, bytes), options) of a request that the server received."""
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numpy_arrays_come_back_bit_for_bit(scripted, connect, dtype):
    bits = np.random.default_rng(0).integers(0, 256, (2, 1, 5, 3, 8), np.uint8)
    array = bits.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)[..., 0].copy()
    o = connect(scripted.url).attention(array, array, array)
    assert (o.dtype, o.shape, o.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert o.flags.writeable


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (3, 4), (1, 0, 4)])
def test_empty_tensors_and_every_rank_travel(scripted, connect, shape):
    q = np.zeros(shape, ">f4")
    o = connect(scripted.url).attention(q, q, q)
    assert (o.shape, o.dtype) == (shape, np.float32)


def test_a_tensor_behind_one_of_smaller_elements_is_aligned(scripted, connect):
    o, lse = np.ones(3, np.float16), np.array([1.5, 2.5], np.float32)
    scripted.script.append(lambda h: h.answer(body=message({"o": o, "lse": lse})))
    actual = connect(scripted.url).attention(Q, Q, Q, return_lse=True)
    assert [t.tolist() for t in actual] == [o.tolist(), lse.tolist()]
    assert all(t.flags.aligned for t in actual)


def test_gradients_come_in_the_order_that_was_asked(scripted, connect):
    answer = {"dk": Q + 1, "dsinks": Q[0, 0, 0], "dq": Q}
    scripted.script.append(lambda h: h.answer(body=message(answer)))
    actual = connect(scripted.url).attention_grad(Q, Q, Q, Q, o=Q, lse=Q[..., 0], grads=["dq", "dsinks", "dk"])
    assert [t.tolist() for t in actual] == [answer[n].tolist() for n in ("dq", "dsinks", "dk")]
    tensors, options = sent(scripted)
    assert tensors.keys() == {"q", "k", "v", "do", "o", "lse"}
    assert options == {"grads": ["dq", "dsinks", "dk"]}
    assert scripted.requests[0][1] == "/attention/grad"


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


@pytest.mark.parametrize(
    ("status", "family"),
    [
        (400, flashpoint.BadRequestError), (401, flashpoint.AuthenticationError), (403, flashpoint.AuthenticationError),
        (404, flashpoint.BadRequestError), (406, flashpoint.BadRequestError), (408, flashpoint.BadRequestError),
        (413, flashpoint.TooLargeError), (415, flashpoint.BadRequestError), (422, flashpoint.InvalidInputError),
        (429, flashpoint.OverloadedError), (500, flashpoint.ServerError), (502, flashpoint.ServerError),
        (503, flashpoint.OverloadedError), (504, flashpoint.DeadlineExceededError), (302, flashpoint.ProtocolError),
    ],
)  # fmt: skip
def test_each_status_is_an_error_of_its_family(scripted, connect, status, family):
    scripted.script.append(lambda h: h.problem(status))
    with pytest.raises(family) as info:
        connect(scripted.url, retries=0).attention(Q, Q, Q)
    assert type(info.value) is family
    assert (info.value.status, info.value.request_id) == (status, "r1") or status == 302
    if status >= 400:
        assert str(info.value) == f"{status} some_code: some detail (request r1)"


def test_field_errors_are_read_and_an_error_page_is_no_surprise(scripted, connect):
    document = (
        b'{"detail": "not valid", "errors": [{"loc": ["q"], "msg": "too flat"}, {"loc": "k", "msg": "too long"}]}'
    )
    for body in (document, b"<html>Bad gateway", b"[" * 100_000, b""):
        scripted.script.append(lambda h, body=body: h.answer(422, body, "text/html", X_Request_Id="r2"))
    client = connect(scripted.url)
    with pytest.raises(ValueError, match="q: too flat") as info:
        client.attention(Q, Q, Q)
    assert info.value.errors == (("q", "too flat"), ("k", "too long"))
    for _ in range(3):
        with pytest.raises(flashpoint.InvalidInputError) as info:
            client.attention(Q, Q, Q)
        assert info.value.request_id == "r2"


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_full_is_asked_again(scripted, connect, delays, status):
    scripted.script.extend([lambda h: h.problem(status)] * 2)
    assert np.array_equal(connect(scripted.url).attention(Q, Q, Q), Q)
    assert len(scripted.requests) == 3
    assert {body for *_, body in scripted.requests} == {scripted.requests[0][3]}


def test_retry_after_is_honoured(scripted, connect, delays):
    scripted.script.append(lambda h: h.problem(503, Retry_After="7"))
    connect(scripted.url).attention(Q, Q, Q)
    assert delays == [7]


def test_retry_after_may_be_a_date(monkeypatch):
    monkeypatch.setattr(exchange, "time", SimpleNamespace(time=lambda: 1_000_000_000.0))
    assert exchange._retry_after({"retry-after": "Sun, 09 Sep 2001 01:47:10 GMT"}) == 30
    assert exchange._retry_after({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0
    assert exchange._retry_after({"retry-after": "soon"}) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("9" * 400, 1_000_000), ("99999999999", 1_000_000), ("-5", None), ("1e999", None), ("inf", None), ("nan", None),
     ("²", None), ("", None), ("Fri, 31 Dec 9999 23:59:59 GMT", 1_000_000), ("Mon, 01 Jan 0001 00:00:00 +1400", None),
     ("Mon, 99 Foo 99999999999999999999 00:00:00 GMT", None), ("Sun, 06 Nov 1994 08:49:37 -9999", None)],
)  # fmt: skip
def test_a_retry_after_of_any_text_is_a_wait_that_can_be_slept_or_none(value, seconds):
    wait = exchange._retry_after({"retry-after": value})
    assert wait == seconds or (value.startswith(("Mon, 01", "Sun, 06")) and wait in (0.0, None))


def test_the_delay_of_any_retry_is_bounded():
    assert 5 <= exchange.backoff(10**6) <= 10


def test_no_retry_is_begun_that_the_timeout_would_cut_off(scripted, connect, delays):
    scripted.script.append(lambda h: h.problem(503, Retry_After="301"))
    with pytest.raises(flashpoint.OverloadedError) as info:
        connect(scripted.url, timeout=300).attention(Q, Q, Q)
    assert info.value.retry_after == 301
    assert (delays, len(scripted.requests)) == ([], 1)


def test_retries_end(scripted, connect, delays):
    scripted.script.extend([lambda h: h.problem(429)] * 10)
    with pytest.raises(flashpoint.OverloadedError):
        connect(scripted.url, retries=3).attention(Q, Q, Q)
    assert len(scripted.requests) == 4
    assert all(longest / 2 <= delay <= longest for delay, longest in zip(delays, (0.1, 0.2, 0.4), strict=True))


def test_a_request_that_would_fail_again_is_not_sent_again(scripted, connect, delays):
    for status in (400, 422, 500, 504):
        scripted.script.append(lambda h, status=status: h.problem(status))
        before = len(scripted.requests)
        with pytest.raises(flashpoint.FlashpointError):
            connect(scripted.url).attention(Q, Q, Q)
        assert len(scripted.requests) == before + 1


def test_a_call_whose_connection_broke_is_sent_again(scripted, connect, delays):
    def half(handler):
        handler.answer(body=message({"o": Q})[:-8], length=len(message({"o": Q})))
        handler.close_connection = True

    scripted.script.extend([lambda h: h.vanish(), half])
    client = connect(scripted.url)
    assert np.array_equal(client.attention(Q, Q, Q), Q)
    assert len(scripted.requests) == 3


@pytest.mark.parametrize("status", [500, 502])
def test_a_call_whose_connection_broke_behind_a_proxy_is_sent_again(scripted, connect, delays, status):
    scripted.script.extend([lambda h: h.answer(status, b"Internal Server Error", "text/plain; charset=utf-8")] * 3)
    assert np.array_equal(connect(scripted.url).attention(Q, Q, Q), Q)
    scripted.script.append(lambda h: h.answer(status, b"<html>", "text/html"))
    with pytest.raises(flashpoint.ConnectionFailedError, match=str(status)):
        connect(scripted.url, retries=0).attention(Q, Q, Q)


def test_no_server_is_a_connection_error_after_the_retries(connect, delays):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = connect(f"http://127.0.0.1:{unused.getsockname()[1]}", retries=2)
        with pytest.raises(ConnectionError) as info:
            client.attention(Q, Q, Q)
        assert isinstance(info.value, flashpoint.ConnectionFailedError)
        assert isinstance(info.value.__cause__, httpx.ConnectError)
        assert not client.live()
        assert not client.ready()


@pytest.fixture
def connected(scripted, connect):
    """Return a client with a connection, so that the timeout of its next call expires after the connect."""
    client = connect(scripted.url, retries=0)
    client.attention(Q, Q, Q)
    return client


def test_a_server_that_never_answers_meets_the_timeout(scripted, connected):
    done = threading.Event()
    scripted.script.append(lambda h: done.wait(PATIENCE))
    with pytest.raises(TimeoutError) as info:
        connected.attention(Q, Q, Q, timeout=0.2)
    done.set()
    assert isinstance(info.value, flashpoint.DeadlineExceededError)


def test_a_server_that_trickles_meets_the_timeout_too(scripted, connected):
    """Arriving bytes do not renew the timeout: they arrive until the client has left."""
    stop = threading.Event()

    def trickle(handler):
        handler.answer(body=message({"o": Q})[:8], length=1 << 20)
        while not stop.wait(0.05):
            handler.wfile.write(b" ")

    scripted.script.append(trickle)
    with pytest.raises(flashpoint.DeadlineExceededError):
        connected.attention(Q, Q, Q, timeout=0.3)
    stop.set()


def test_time_spent_sending_is_not_given_again_to_the_wait(scripted, connect, monkeypatch):
    """Connecting, sending, waiting and receiving share the deadline of the call."""
    deadlines = []
    now, run, run_async = time.monotonic(), transport.run, transport.run_async

    def observed(steps, deadline, *more):
        deadlines.append(deadline)
        return run(steps, deadline, *more)

    def observed_async(steps, deadline, *more):
        deadlines.append(deadline)
        return run_async(steps, deadline, *more)

    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(transport, "run", observed)
    monkeypatch.setattr(transport, "run_async", observed_async)
    connect(scripted.url).attention(Q, Q, Q, timeout=600)
    assert len(deadlines) >= 3
    assert set(deadlines) == {now + 600}


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


def test_lengths_may_be_lists_and_say_so(scripted, connect):
    with pytest.raises(flashpoint.InvalidInputError, match="must be a numpy array, a torch tensor or a list, not int"):
        connect(scripted.url).attention(Q, Q, Q, kv_lengths=3)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("retries", {"retries": -1}), ("timeout", {"timeout": -1}), ("timeout", {"timeout": 1_000_001}),
        *(("url", {"url": url}) for url in ("http://x:port", "localhost:8000", "ftp://x", "http://", "/here", "")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [flashpoint.Client, flashpoint.AsyncClient])
def test_bad_settings_are_refused_and_named(kind, field, settings):
    with pytest.raises(flashpoint.InvalidInputError) as info:
        kind(**settings)
    assert info.value.errors[0].field == field


def test_the_longest_timeout_is_taken(scripted, connect):
    assert np.array_equal(connect(scripted.url, timeout=1_000_000).attention(Q, Q, Q), Q)


def test_a_connection_that_takes_too_long_says_that_the_deadline_passed(connect, timed_waits):
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # one connection is queued, and the others wait
        first.connect(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(flashpoint.ConnectionFailedError) as info:
            connect(url, timeout=0.1, retries=0).attention(Q, Q, Q)
    assert str(info.value) == f"the deadline passed before there was a connection to {url}"


def test_return_lse_is_not_of_a_gradient(scripted, connect):
    with pytest.raises(flashpoint.InvalidInputError, match="return_lse"):
        connect(scripted.url).attention_grad(Q, Q, Q, Q, return_lse=True)


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


def test_many_calls_of_one_async_client_run_at_once(scripted):
    barrier = threading.Barrier(4, timeout=PATIENCE)

    def together(handler):
        barrier.wait()
        handler.answer(body=message({"o": Q}))

    async def run():
        scripted.script.extend([together] * 4)
        async with flashpoint.AsyncClient(scripted.url) as client:
            return await asyncio.gather(*(client.attention(Q, Q, Q) for _ in range(4)))

    assert all(np.array_equal(o, Q) for o in asyncio.run(run()))


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


def test_backoff_doubles_jitters_and_is_bounded():
    for failures, longest in [(0, 0.1), (1, 0.2), (3, 0.8), (20, 10.0)]:
        delays = [exchange.backoff(failures) for _ in range(50)]
        assert all(longest / 2 <= delay <= longest for delay in delays)
        assert len(set(delays)) > 1


def test_a_balancers_cookie_and_the_addresss_path_go_with_every_call(scripted, connect):
    scripted.script.append(lambda handler: handler.answer(body=message({"o": Q}), Set_Cookie="replica=7; Path=/"))
    client = connect(f"{scripted.url}/behind/this")
    for _ in range(2):
        client.attention(Q, Q, Q)
    (_, path, first, _), (_, _, second, _) = scripted.requests
    assert (path, first["Host"]) == ("/behind/this/attention", f"127.0.0.1:{scripted.server_port}")
    assert (first["Cookie"], second["Cookie"]) == (None, "replica=7")


@pytest.mark.parametrize("kind", [flashpoint.Client, flashpoint.AsyncClient])
def test_a_client_reads_its_server_and_its_key_from_the_environment(kind, monkeypatch):
    assert kind().url == "http://localhost:8000"
    monkeypatch.setenv("FLASHPOINT_URL", "http://there:9000")
    monkeypatch.setenv("FLASHPOINT_API_KEY", "secret")
    assert (kind().url, kind()._http.headers["authorization"]) == ("http://there:9000", "Bearer secret")
    assert kind("http://here", api_key="own")._http.headers["authorization"] == "Bearer own"
    assert "authorization" not in kind(api_key="")._http.headers


def methods(kind):
    """Return the public methods of a class, each with the names, kinds and defaults of its parameters."""
    results = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            parameters = inspect.signature(function).parameters.values()
            results[name.removeprefix("a") if name == "aclose" else name] = [
                (p.name, p.kind, p.default) for p in parameters
            ]
    return results


@pytest.mark.parametrize(
    ("kind", "twin"),
    [
        (flashpoint.Client, flashpoint.AsyncClient),
        (flashpoint.Cache, flashpoint.AsyncCache),
        (flashpoint.BenchmarkRun, flashpoint.AsyncBenchmarkRun),
        (sharded.ShardedCache, sharded.AsyncShardedCache),
    ],
)
def test_the_asyncio_twin_has_the_same_methods_and_parameters(kind, twin):
    assert methods(kind) == methods(twin)


def test_a_deadline_that_passes_before_a_retry_tells_the_last_failure(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    attempts = exchange.Exchange(lookup("/info"), timeout=1.0, retries=4)
    with httpx.Client(base_url="http://127.0.0.1:9") as http:
        attempts.request(http)
        assert attempts.failed(httpx.ConnectError("refused")) < 1
        clock[0] = 2.0  # a busy machine slept longer than requested
        with pytest.raises(flashpoint.ConnectionFailedError, match="refused") as error:
            attempts.request(http)
        with pytest.raises(flashpoint.ConnectionFailedError, match="refused"):
            attempts.failed(error.value)
