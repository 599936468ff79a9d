"""After a fork, the client of the child process uses other connections, threads and locks than its parent."""

import asyncio
import multiprocessing
import os
import signal
import threading

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint._calls.service import lookup
from flashpoint._http import dial
from flashpoint._shards.rounds import Threads
from flashpoint._shards.spread import PartCall, Round
from tests.support.forks import BESIDE_JAX, Child, in_child
from tests.support.proxies import ProxyServer
from tests.support.raw_server import read_request
from tests.support.scripted_server import message

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    *BESIDE_JAX,
]
CALLS = 20


def tensor(number):
    return np.full((1, 1, 2, 4), number, np.float32)


def wrong(client, first):
    """Make CALLS calls; return how many get the answer of another call. The server answers each call with its q."""
    return sum(not np.array_equal(client.attention(q := tensor(first + i), q, q), q) for i in range(CALLS))


def all_wrong(client):
    """Return the number of wrong answers in this process and three children, which make calls at the same time.

    No child makes calls before all are forked: while a server's thread of this process answers, it holds OpenSSL's
    locks, and a child forked then would have them locked for ever.
    """
    client.attention(*[tensor(-1)] * 3)  # leaves an idle connection, which a fork copies
    gate, opener = os.pipe()
    children = [Child(lambda n=n: wrong(client, 1000 * n) if os.read(gate, 1) else None) for n in (1, 2, 3)]
    os.write(opener, b"all")
    number = wrong(client, 0) + sum(child.result() for child in children)
    os.close(gate)
    os.close(opener)
    return number


def test_parent_and_children_get_their_own_answers(scripted, connect):
    assert all_wrong(connect(scripted.url)) == 0


@pytest.mark.parametrize("scheme", [pytest.param("http", marks=pytest.mark.slow), "socks5"])
def test_so_they_do_behind_a_proxy(scripted, connect, monkeypatch, no_environment, scheme):
    with ProxyServer(scheme) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert all_wrong(connect(scripted.url)) == 0
        assert proxy.asked


def answer(body):
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.safetensors\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body), body,
    )  # fmt: skip


def echo(connection):
    while (body := read_request(connection)) is not None:
        size = 8 + int.from_bytes(body[:8], "little")
        q = np.frombuffer(body, np.float32, offset=size)[:8].reshape(1, 1, 2, 4)
        connection.sendall(answer(message({"o": q})))


def test_so_they_do_over_tls_and_the_parent_keeps_its_connection(raw, connect, tls_server):
    """A child must not shut down TLS on its copy of a connection, because this would end the parent's connection."""
    server = raw(echo, tls=tls_server)
    client = connect(server.url)
    assert all_wrong(client) == 0
    opened = server.opened
    in_child(client.close)
    assert wrong(client, 0) == 0
    assert server.opened == opened


def test_nested_forks(scripted, connect):
    client = connect(scripted.url)
    client.attention(*[tensor(-1)] * 3)

    def child():
        grandchild = Child(lambda: wrong(client, 2000))
        return wrong(client, 1000) + grandchild.result()

    assert in_child(child) == 0


def test_a_child_closes_the_copies_of_connections_at_once(raw, connect):
    """If children kept copies of a connection open, the server would see its end only when all children have ended."""
    seen = threading.Event()

    def talk(connection):
        echo(connection)  # returns when the server sees that the connection is closed
        seen.set()

    client = connect(raw(talk).url)
    client.attention(*[tensor(1)] * 3)
    ours, theirs = os.pipe()
    child = Child(lambda: os.read(ours, 1))  # the child stays alive and makes no calls
    client.close()
    assert seen.wait(60)
    os.write(theirs, b"\0")
    child.result()
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_that_another_thread_makes_during_the_fork_is_unharmed(raw, asynchronous):
    begun, answered = threading.Event(), threading.Event()
    slow = tensor(7)

    def talk(connection):
        while (body := read_request(connection)) is not None:
            q = np.frombuffer(body, np.float32, offset=8 + int.from_bytes(body[:8], "little"))[:8].reshape(slow.shape)
            if np.array_equal(q, slow):
                begun.set()
                answered.wait(60)
            connection.sendall(answer(message({"o": q})))

    server, answers = raw(talk), []

    def call():
        if asynchronous:

            async def run():
                async with flashpoint.AsyncClient(server.url) as client:
                    clients.append(client)
                    answers.append(await client.attention(slow, slow, slow))

            asyncio.run(run())
        else:
            answers.append(clients[0].attention(slow, slow, slow))

    clients = [] if asynchronous else [flashpoint.Client(server.url)]
    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(60)

    def child():
        if not asynchronous:
            return wrong(clients[0], 100)

        async def run():
            return [np.array_equal(await clients[0].attention(q, q, q), q) for q in map(tensor, range(5))].count(False)

        return asyncio.run(run())

    assert in_child(child) == 0
    answered.set()
    thread.join()
    assert np.array_equal(answers[0], slow)
    if not asynchronous:
        clients[0].close()


def test_locks_that_are_held_during_the_fork_do_not_stop_the_child(scripted, connect):
    scripted.script.extend([lambda handler: handler.answer(body=b"{}", media="application/json")] * 4)
    client, both = connect(scripted.url), Round([PartCall(number, lookup("/a")) for number in (0, 1)])

    def child():
        signal.alarm(60)
        return threads.run(asking()), wrong(client, 0)

    def asking():
        return (yield both)

    def forking():  # `run` holds its lock, and has started threads, which the child lacks
        yield both
        with dial._lookups._lock:
            return in_child(child)

    with flashpoint.Client(scripted.url) as one:
        threads = Threads([one, one])
        assert threads.run(forking()) == ([{}, {}], 0)
        threads.close()


def test_a_pool_of_processes(scripted):
    with flashpoint.Client(scripted.url) as client:
        client.attention(*[tensor(-1)] * 3)
        global _inherited
        _inherited = client
        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert sum(pool.map(_in_pool, range(6))) == 0
        assert wrong(client, 0) == 0


def _in_pool(number):
    return wrong(_inherited, 100 * number)


def test_a_transport_of_the_caller_is_refused_after_a_fork(scripted):
    with flashpoint.Client(scripted.url, transport=httpx.HTTPTransport()) as client:
        client.attention(*[tensor(-1)] * 3)

        def child():
            with pytest.raises(flashpoint.InvalidInputError, match="make a new client after a fork"):
                client.attention(*[tensor(-1)] * 3)

        in_child(child)
        assert wrong(client, 0) == 0
