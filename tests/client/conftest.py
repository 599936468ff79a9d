import asyncio
import contextlib
import threading

import pytest

import flashpoint
from tests.support.raw_server import RawServer
from tests.support.scripted_server import ScriptedServer


@pytest.fixture
def scripted():
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Twin:
    """`AsyncClient` driven from a test that is not async, so that each test runs on both clients."""

    def __init__(self, *args, **settings):
        self._loop = asyncio.new_event_loop()
        self._client = flashpoint.AsyncClient(*args, **settings)

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **keywords: self._loop.run_until_complete(method(*args, **keywords))

    def close(self):
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._client.aclose())
            self._loop.close()


@pytest.fixture(params=[flashpoint.Client, Twin], ids=["sync", "async"])
def connect(request):
    made = []

    def connect(*args, **settings):
        made.append(request.param(*args, **settings))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def raw():
    """A factory of `RawServer`s, which end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda talk, **how: stack.enter_context(RawServer(talk, **how))
