"""A call is retried after failures that a retry can cure, and fails at its timeout."""

import socket
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint._calls.service import lookup
from flashpoint._http import exchange, transport
from tests.support.framed import Q, echo
from tests.support.scripted_server import message

PATIENCE = 60  # seconds; a longer wait is a hang


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_full_is_asked_again(scripted, connect, delays, status):
    scripted.script.extend([lambda h: h.problem(status)] * 2)
    assert np.array_equal(connect(scripted.url).attention(Q, Q, Q), Q)
    assert len(scripted.requests) == 3
    assert {body for *_, body in scripted.requests} == {scripted.requests[0][3]}


def test_retry_after_is_honoured(scripted, connect, delays):
    scripted.script.append(lambda h: h.problem(503, Retry_After="7"))
    connect(scripted.url).attention(Q, Q, Q)
    assert [7 <= delay <= 7.5 for delay in delays] == [True]


def test_callers_that_a_full_server_refused_at_once_return_at_different_times(scripted, connect, delays):
    scripted.script.extend([lambda h: h.problem(429, Retry_After="1")] * 40)
    connect(scripted.url, retries=40, timeout=None).attention(Q, Q, Q)
    assert all(1 <= delay <= 1.5 for delay in delays[:3])  # later, `backoff` may be longer
    assert len(set(delays)) == len(delays) == 40


@pytest.mark.parametrize("left", [1.001, 1.1, 1.4, 3])
def test_a_retry_whose_wait_ends_before_the_deadline_is_made(left):
    waits = {exchange.pause(0, 1.0, left) for _ in range(50)}
    assert all(1 <= wait < left for wait in waits)
    assert len(waits) > 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("Sun, 09 Sep 2001 01:47:10 GMT", 30), ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("soon", None),
     ("9" * 400, 1_000_000), ("99999999999", 1_000_000), ("-5", None), ("1e999", None), ("inf", None), ("nan", None),
     ("²", None), ("", None), ("Fri, 31 Dec 9999 23:59:59 GMT", 1_000_000), ("Mon, 01 Jan 0001 00:00:00 +1400", None),
     ("Mon, 99 Foo 99999999999999999999 00:00:00 GMT", None), ("Sun, 06 Nov 1994 08:49:37 -9999", None)],
)  # fmt: skip
def test_a_retry_after_of_any_text_is_a_wait_that_can_be_slept_or_none(scripted, monkeypatch, value, seconds):
    now = SimpleNamespace(time=lambda: 1_000_000_000.0, monotonic=time.monotonic)
    monkeypatch.setattr(exchange, "time", now)
    scripted.script.append(lambda h: h.problem(503, Retry_After=value))
    with flashpoint.Client(scripted.url, retries=0) as client, pytest.raises(flashpoint.OverloadedError) as info:
        client.info()
    wait = info.value.retry_after
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
    """Return a client with an open connection, so that a timeout of its next call does not expire while it connects."""
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
    """Arriving bytes do not restart the timeout: the server sends bytes until the client closes the connection."""
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


def test_a_connection_that_takes_too_long_says_that_the_deadline_passed(connect, timed_waits):
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # the backlog fits one connection
        first.connect(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with pytest.raises(flashpoint.ConnectionFailedError) as info:
            connect(url, timeout=0.1, retries=0).attention(Q, Q, Q)
    assert str(info.value) == f"the deadline passed before there was a connection to {url}"


def test_backoff_doubles_jitters_and_is_bounded():
    for failures, longest in [(0, 0.1), (1, 0.2), (3, 0.8), (20, 10.0)]:
        delays = [exchange.backoff(failures) for _ in range(50)]
        assert all(longest / 2 <= delay <= longest for delay in delays)
        assert len(set(delays)) > 1


def test_a_deadline_that_passes_before_a_retry_tells_the_last_failure(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    attempts = exchange.Exchange(lookup("/info"), timeout=1.0, retries=4)
    with httpx.Client(base_url="http://127.0.0.1:9") as http:
        attempts.request(http)
        assert attempts.failed(httpx.ConnectError("refused")) < 1
        clock[0] = 2.0  # after the timeout, as if the sleep before the retry had taken 2 s
        with pytest.raises(flashpoint.ConnectionFailedError, match="refused") as error:
            attempts.request(http)
        with pytest.raises(flashpoint.ConnectionFailedError, match="refused"):
            attempts.failed(error.value)


@pytest.mark.parametrize("to", ["https://me:S3cret@other.example/attention", "/login?next=1"])
def test_a_redirect_names_its_location_without_credentials(scripted, connect, to):
    scripted.script.append(lambda handler: handler.answer(307, Location=to))
    with pytest.raises(flashpoint.ProtocolError, match="redirects to http") as refused:
        connect(scripted.url, retries=0).info()
    assert "S3" not in str(refused.value)
    assert ("other.example/attention" if "other" in to else "/login?next=1") in str(refused.value)


@pytest.mark.parametrize("media", ["Application/Vnd.Safetensors", "APPLICATION/VND.SAFETENSORS ; Charset=Binary"])
def test_media_types_are_read_in_any_case(scripted, connect, media):
    import numpy as np

    from tests.support.scripted_server import message

    q = np.zeros((1, 1, 2, 4), np.float32)
    scripted.script.append(lambda handler: handler.answer(body=message({"o": q}), media=media))
    assert np.array_equal(connect(scripted.url).attention(q, q, q), q)


def test_https_to_a_server_of_http_says_so(scripted, connect):
    with pytest.raises(flashpoint.ConnectionFailedError, match="does not use TLS: begin its address with http://"):
        connect(scripted.url.replace("http", "https"), retries=0).info()


def test_https_to_a_server_that_hangs_up_says_so(raw, connect):
    server = raw(lambda connection: connection.recv(1 << 16))
    with pytest.raises(
        flashpoint.ConnectionFailedError, match="if it does not use TLS, begin its address with http://"
    ):
        connect(server.url.replace("http", "https"), retries=0).info()


def test_http_to_a_server_of_https_says_so(raw, connect, tls_server):
    server = raw(echo, tls=tls_server)
    with pytest.raises(flashpoint.ConnectionFailedError, match=r"uses TLS.* begin its address with https://"):
        connect(server.url.replace("https", "http"), retries=0).info()


def test_replicas_that_name_each_other_are_asked_once_each(scripted, connect, delays):
    """A call moves to the replica that holds its caches at most once: the second answer is the caller's."""
    for replica in ("b", "a", "b", "a"):
        scripted.script.append(lambda h, named=replica: h.problem(421, "cache_elsewhere", X_Flashpoint_Replica=named))
    with pytest.raises(flashpoint.CacheError) as info:
        connect(scripted.url, retries=0).attention(Q, caches=["c1"])
    assert info.value.code == "cache_elsewhere"
    assert [headers["X-Flashpoint-Replica"] for _, _, headers, _ in scripted.requests] == [None, "b"]


def test_an_error_after_an_answer_that_broke_is_read_as_an_error(scripted, connect, delays):
    def breaks(handler):
        handler.answer(body=message({"o": Q})[:-8], length=len(message({"o": Q})))
        handler.close_connection = True

    scripted.script.extend([breaks, lambda h: h.problem(422, "invalid_request")])
    with pytest.raises(flashpoint.InvalidInputError):
        connect(scripted.url).attention(Q, Q, Q)
    assert len(scripted.requests) == 2


def test_the_server_is_told_how_many_milliseconds_are_left(scripted, connect, timed_waits):
    connect(scripted.url, timeout=99.5).attention(Q, Q, Q)
    connect(scripted.url).attention(Q, Q, Q, timeout=250.25)
    assert [headers["X-Timeout-Ms"] for _, _, headers, _ in scripted.requests] == ["99500", "250250"]


def test_a_forward_that_cannot_be_saved_is_sent_again_with_all_that_was_asked(scripted, connect, delays):
    scripted.script.append(lambda h: h.problem(429, "cache_memory"))
    connect(scripted.url).attention(Q, Q, Q, save=True, priority=7, request_id="mine", timeout=50, scale=0.25)
    (_, _, first, saving), (_, _, second, plain) = scripted.requests
    assert [first[name] for name in ("X-Priority", "X-Request-Id")] == ["7", "mine"]
    assert [second[name] for name in ("X-Priority", "X-Request-Id")] == ["7", "mine"]
    assert int(second["X-Timeout-Ms"]) <= 50_000
    assert b'"scale":"0.25"' in saving
    assert b'"scale":"0.25"' in plain
    assert b'"save"' not in plain
