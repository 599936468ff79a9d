"""A sharded call retries a shard elsewhere or raises the right error if a server is full, gone, silent or fails."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections import deque

import numpy as np
import pytest

import flashpoint
from flashpoint import sharded
from flashpoint._shards import work
from flashpoint_contract.wire import head_size, parse_head
from tests.support.raw_server import PATIENCE, until_closed
from tests.support.scripted_server import ScriptedServer, message
from tests.support.servers import wait_for

Q, K, V = np.random.default_rng(0).standard_normal((3, 1, 2, 12, 4), dtype=np.float32)


def solved(q, k, v):
    """Return o and lse of attention over all keys, with the default scale."""
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    lse = np.logaddexp.reduce(s, axis=-1)
    return np.exp(s - lse[..., None]) @ v, lse


def solve(handler):
    """Answer a request as the service does, with the o and lse of its q, k and v."""
    head = parse_head(handler.body[: head_size(handler.body[:8])])
    data = np.frombuffer(handler.body, np.uint8)[head.size :]
    q, k, v = (data[t.start : t.stop].view(np.float32).reshape(t.shape) for t in head.tensors)
    o, lse = solved(q, k, v)
    handler.answer(body=message({"o": o, "lse": lse}))


@pytest.fixture
def servers():
    """Yield three scripted servers that answer 100 requests each by `solve`. A test may put other steps first."""
    with contextlib.ExitStack() as stack:
        results = []
        for _ in range(3):
            server = stack.enter_context(ScriptedServer())
            server.script = deque([solve] * 100)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.002})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            results.append(server)
        yield results


@pytest.fixture(params=["threads", "asyncio"])
def attention(request):
    """Return `attention(urls, **keywords)`, which sends Q, K and V to these servers with one of the kinds of client."""

    def in_threads(urls, retries=4, **keywords):
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(flashpoint.Client(url, retries=retries)) for url in urls]
            return sharded.attention(clients, Q, K, V, **keywords)

    async def in_asyncio(urls, retries=4, **keywords):
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(flashpoint.AsyncClient(url, retries=retries)) for url in urls]
            return await sharded.async_attention(clients, Q, K, V, **keywords)

    if request.param == "threads":
        return in_threads
    return lambda urls, **keywords: asyncio.run(in_asyncio(urls, **keywords))


def busy(handler):
    handler.problem(503, Retry_After="900")


def full(handler):
    handler.problem(429, Retry_After="900")


def gone(handler):
    handler.vanish()


def wait_for_requests(*servers):
    """Wait until each of these servers has received a request."""
    wait_for(lambda: all(server.requests for server in servers), lambda: "a server is not asked")


def closed(*servers):
    """Wait until the clients have closed all connections to these servers."""
    wait_for(lambda: all(s.opened == s.closed for s in servers), lambda: "a connection stays open")


@pytest.fixture
def nobody():
    """Yield a URL at which connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without listen: connections are refused
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("parts", [(1, 3), (3, 1), (2, 4)])
def test_the_parts_are_merged_to_the_whole(attention, servers, parts):
    (o, lse), actual = attention([s.url for s in servers], parts=parts, return_lse=True, with_meta=True)
    expected = solved(Q, K, V)
    np.testing.assert_allclose(o, expected[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=2e-6, atol=2e-6)
    assert len(actual) == parts[0] * parts[1]
    assert sum(part.pairs for part in actual) == 2 * 12 * 12
    assert sum(len(server.requests) for server in servers) == len(actual)


@pytest.mark.parametrize("failing", [busy, full, gone])
def test_a_failed_shard_goes_to_another_server(attention, servers, failing):
    """Another server computes the shard of a server that fails, or asks for a wait beyond the timeout of 600 s."""

    def behind_it(handler):
        wait_for_requests(servers[0])
        solve(handler)

    servers[0].script = deque([failing] * 100)
    for server in servers[1:]:
        server.script.appendleft(behind_it)
    o, parts = attention([s.url for s in servers], parts=(1, 3), timeout=600, with_meta=True)
    np.testing.assert_allclose(o, solved(Q, K, V)[0], rtol=2e-6, atol=2e-6)
    assert servers[0].url not in {part.url for part in parts}
    assert sum(part.meta.retries for part in parts) >= 1


def test_a_server_that_is_not_there_is_done_without(attention, servers, nobody):
    o, parts = attention([nobody, servers[0].url], parts=(2, 2), with_meta=True)
    np.testing.assert_allclose(o, solved(Q, K, V)[0], rtol=2e-6, atol=2e-6)
    assert {part.url for part in parts} == {servers[0].url}


def test_a_server_that_was_full_for_a_moment_is_asked_again(attention, servers):
    servers[0].script.appendleft(lambda handler: handler.problem(503, Retry_After="0"))
    o = attention([servers[0].url], parts=(1, 2))
    np.testing.assert_allclose(o, solved(Q, K, V)[0], rtol=2e-6, atol=2e-6)
    assert len(servers[0].requests) == 3


def test_there_is_an_error_and_no_part_of_an_answer_when_all_fail(attention, servers, nobody):
    for server in servers[:2]:
        server.script = deque([lambda handler: handler.problem(503, "draining", Retry_After="0")] * 100)
    with pytest.raises(flashpoint.OverloadedError, match="draining"):
        attention([s.url for s in servers[:2]], parts=(1, 1), retries=1)
    assert sum(len(server.requests) for server in servers[:2]) == 4  # two attempts at each server
    with pytest.raises(flashpoint.ConnectionFailedError):
        attention([nobody, nobody], retries=0)


def silent(raw):
    """Start a server that reads all bytes, never answers, and counts opened and closed connections."""
    return raw(until_closed)


def connected(*servers):
    """Wait until each of these silent servers has a connection."""
    wait_for(lambda: all(server.opened for server in servers), lambda: "a server is not asked")


@pytest.mark.parametrize(
    ("status", "error"),
    [(422, flashpoint.InvalidInputError), (500, flashpoint.ServerError), (413, flashpoint.TooLargeError)],
)
def test_an_error_that_no_other_server_mends_ends_all(attention, servers, raw, status, error):
    quiet = silent(raw)

    def refuse(handler):
        connected(quiet)
        handler.problem(status)

    servers[0].script = deque([refuse])
    with pytest.raises(error):
        attention([quiet.url, servers[0].url], parts=(1, 2), timeout=600)
    assert quiet.opened == 1
    closed(quiet)


def test_the_deadline_holds_for_all(attention, servers, raw):
    quiet = [silent(raw) for _ in range(2)]
    with pytest.raises(flashpoint.DeadlineExceededError):
        attention([server.url for server in quiet], parts=(1, 4), timeout=0.2)
    closed(*quiet)


def test_a_silent_servers_shard_is_asked_of_another_at_half_time(attention, servers, raw, clock):
    """Half of the timeout passes 0.2 s after a server has answered. Then this server gets the silent server's shard."""
    quiet, time = silent(raw), clock(work)

    def until_shortly_before_half_time(handler):
        connected(quiet)
        time.advance(299.8)
        solve(handler)

    servers[0].script.extendleft([until_shortly_before_half_time, solve])
    o, actual = attention([quiet.url, servers[0].url], parts=(1, 3), timeout=600, with_meta=True)
    np.testing.assert_allclose(o, solved(Q, K, V)[0], rtol=2e-6, atol=2e-6)
    assert {part.url for part in actual} == {servers[0].url}
    assert len(servers[0].requests) == len(actual)  # no shard was sent twice
    closed(quiet)


def test_a_late_error_about_a_shard_that_is_answered_ends_nothing(attention, servers, clock):
    """An error about a shard does not end the call if another server has already answered this shard."""
    answered, refused, time = threading.Event(), threading.Event(), clock(work)
    bodies = []

    def late(handler):
        assert answered.wait(PATIENCE)
        if handler.body == bodies[0]:
            handler.problem(500)
            refused.set()
        else:
            last(handler)

    def first(handler):
        wait_for_requests(*servers[:2])
        time.advance(300)  # half of the timeout: now this server may take the shards of the others
        solve(handler)

    def second(handler):
        bodies.append(handler.body)
        solve(handler)

    def last(handler):
        answered.set()
        assert refused.wait(PATIENCE)
        solve(handler)

    servers[0].script = deque([late])
    servers[1].script = deque([late])
    servers[2].script = deque([first, second, last])
    o, actual = attention([s.url for s in servers], parts=(1, 3), timeout=600, with_meta=True)
    np.testing.assert_allclose(o, solved(Q, K, V)[0], rtol=2e-6, atol=2e-6)
    assert len(actual) == 3


def test_the_deadline_ends_a_rest_too(attention, servers, clock):
    time = clock(work)

    def shortly_before_the_deadline(handler):
        time.advance(599.8)
        busy(handler)

    servers[0].script = deque([shortly_before_the_deadline])
    with pytest.raises(flashpoint.DeadlineExceededError) as info:
        attention([servers[0].url], timeout=600)
    assert isinstance(info.value.__cause__, flashpoint.OverloadedError)


def test_cancelling_it_cancels_every_shard(raw):
    quiet = [silent(raw) for _ in range(3)]

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(flashpoint.AsyncClient(server.url)) for server in quiet]
            call = asyncio.create_task(sharded.async_attention(clients, Q, K, V))
            await asyncio.to_thread(connected, *quiet)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(closed, *quiet)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_an_interrupt_ends_every_thread(raw):
    """SIGINT in the main thread ends all threads of the call. A handler is set, as background jobs ignore SIGINT."""
    quiet = [silent(raw) for _ in range(2)]
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        connected(*quiet)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, before_test)
        clients = [stack.enter_context(flashpoint.Client(server.url, timeout=600)) for server in quiet]
        before = threading.active_count()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sharded.attention(clients, Q, K, V)
        thread.join()
        closed(*quiet)
        wait_for(lambda: threading.active_count() <= before, lambda: "a thread of the call is left")


def test_a_shard_is_asked_as_often_as_the_client_with_most_retries_would(servers):
    for server in servers[:2]:
        server.script.extendleft([lambda h: h.problem(503)] * 2)
    with flashpoint.Client(servers[0].url, retries=0) as one, flashpoint.Client(servers[1].url, retries=2) as other:
        o = sharded.attention([one, other], Q, K, V, parts=(1, 1))
    np.testing.assert_allclose(o, solved(Q, K, V)[0], rtol=1e-5)
    assert sum(len(server.requests) for server in servers) == 5
