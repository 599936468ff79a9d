"""A wait for the server ends at the deadline or when its asyncio task is cancelled. Then the connection is closed."""

import asyncio
import threading
import time

import numpy as np
import pytest

import flashpoint
from tests.support.framed import BIG, SMALL, TINY, Q, answer
from tests.support.raw_server import PATIENCE, read_head, read_request, until_closed
from tests.support.servers import wait_for


@pytest.mark.parametrize("where", ["within its answer", "within the request"])
def test_a_server_that_falls_silent_meets_the_timeout(raw, connect, where):
    def talk(connection):
        read_request(connection)
        connection.sendall(answer())
        read_head(connection)
        if where == "within its answer":
            connection.sendall(answer()[:-40])
        over.wait(PATIENCE)

    over = threading.Event()
    client = connect(raw(talk, receive_buffer=SMALL).url, retries=0)
    client.attention(Q, Q, Q)  # opens the connection, so that the timeout of the next call does not expire during it
    with pytest.raises(flashpoint.DeadlineExceededError):
        client.attention(BIG if where == "within the request" else Q, TINY, TINY, timeout=0.2)
    over.set()


@pytest.mark.parametrize("when", ["sending", "waiting", "receiving"])
def test_a_cancelled_call_closes_its_connection(raw, when):
    scripts = [True]

    async def run():
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def talk(connection):
            if not scripts:
                read_request(connection)
                return connection.sendall(answer())
            scripts.pop()
            read_head(connection)
            if when == "receiving":
                connection.sendall(answer()[:-8])
            loop.call_soon_threadsafe(reached.set)
            while when == "sending" and not call.done():
                time.sleep(0.01)
            return until_closed(connection)

        server = raw(talk, receive_buffer=SMALL)
        async with flashpoint.AsyncClient(server.url, retries=0) as client:
            call = asyncio.create_task(client.attention(BIG if when == "sending" else Q, Q, Q))
            await reached.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(wait_for, lambda: server.closed == 1, lambda: "the connection stays open")
            assert np.array_equal(await client.attention(Q, Q, Q), Q)

    asyncio.run(run())
