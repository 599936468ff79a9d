"""A transport reuses idle connections, replaces closed ones, and closes all when its client is closed."""

import asyncio
import threading

import numpy as np

import flashpoint
from flashpoint._http import transport
from tests.support.framed import GOOD, Q, answer
from tests.support.raw_server import PATIENCE, read_request, until_closed
from tests.support.servers import wait_for


def test_a_connection_that_was_closed_while_idle_is_replaced(raw, connect):
    def talk(connection):
        read_request(connection)
        connection.sendall(answer())

    server = raw(talk)
    client = connect(server.url, retries=0)
    for round in (1, 2, 3):
        assert np.array_equal(client.attention(Q, Q, Q), Q)
        wait_for(lambda round=round: server.closed == round, lambda: "the connection stays open")
    assert server.opened == 3


def test_a_connection_that_was_idle_for_long_is_not_used_again(scripted, connect, monkeypatch):
    client = connect(scripted.url)
    client.attention(Q, Q, Q)
    client.attention(Q, Q, Q)
    assert scripted.connections == 1
    monkeypatch.setattr(transport, "IDLE_SECONDS", 0)
    client.attention(Q, Q, Q)
    assert scripted.connections == 2


def test_no_more_idle_connections_are_kept_than_there_may_be(scripted, monkeypatch):
    monkeypatch.setattr(transport, "IDLE_CONNECTIONS", 1)
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def together(handler):
        barrier.wait()
        handler.answer(body=GOOD)

    async def run():
        async with flashpoint.AsyncClient(scripted.url) as client:
            for _ in range(2):
                scripted.script.extend([together] * 2)
                await asyncio.gather(*(client.attention(Q, Q, Q) for _ in range(2)))

    asyncio.run(run())
    assert scripted.connections == 3


def test_closing_the_client_closes_its_connections(raw, connect):
    def talk(connection):
        read_request(connection)
        connection.sendall(answer())
        until_closed(connection)

    server = raw(talk)
    client = connect(server.url)
    client.attention(Q, Q, Q)
    assert server.closed == 0
    client.close()
    wait_for(lambda: server.closed == 1, lambda: "the connection stays open")


def test_a_client_closed_under_a_call_lets_it_end_and_keeps_nothing(raw):
    closed = threading.Event()

    def talk(connection):
        read_request(connection)
        connection.sendall(answer()[:-8])
        closed.wait(PATIENCE)
        connection.sendall(answer()[-8:])
        until_closed(connection)

    server = raw(talk)
    client = flashpoint.Client(server.url, retries=0)
    results = []
    thread = threading.Thread(target=lambda: results.append(client.attention(Q, Q, Q)))
    thread.start()
    wait_for(lambda: server.opened == 1, lambda: "nobody connects")
    client.close()
    closed.set()
    thread.join()
    assert np.array_equal(results[0], Q)
    wait_for(lambda: server.closed == 1, lambda: "the connection stays open", seconds=PATIENCE)
