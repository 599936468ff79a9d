import asyncio
import contextlib
import ssl
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import flashpoint
from flashpoint import cli
from flashpoint._client import async_client as _async_client
from flashpoint._client import client as _client
from flashpoint._http import exchange, transport
from tests.support.own_kernels import KERNELS
from tests.support.raw_server import RawServer
from tests.support.scripted_server import ScriptedServer


@pytest.fixture(autouse=True)
def kept_connections(monkeypatch):
    """Let clients reuse a connection that was idle for up to an hour: a busy machine may pause between two calls."""
    monkeypatch.setattr(transport, "IDLE_SECONDS", 3600.0)


@pytest.fixture
def delays(monkeypatch):
    """Return a list that gets the seconds of each wait before a retry. The clients do not wait."""
    waits = []

    async def sleep(delay):
        waits.append(delay)

    monkeypatch.setattr(_client, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(_async_client, "asyncio", SimpleNamespace(sleep=sleep))
    return waits


@pytest.fixture(autouse=True)
def default_width(monkeypatch):
    """Give tables their default width: unset COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys):
    """Return `run(*arguments)`, which runs `flashpoint` and returns (exit code, stdout, stderr)."""

    def run(*arguments):
        code = cli.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return run


class Clock:
    """A replacement for the module `time`, whose monotonic clock a test can advance."""

    time = staticmethod(time.time)

    def __init__(self):
        self._added = 0.0

    def monotonic(self):
        return time.monotonic() + self._added

    def advance(self, seconds):
        self._added += seconds


@pytest.fixture
def clock(monkeypatch):
    """Return `clock(*modules)`, which replaces `time` in these client modules by one `Clock`, and returns it."""

    def install(*modules):
        clock = Clock()
        for module in modules:
            monkeypatch.setattr(module, "time", clock)
        return clock

    return install


@pytest.fixture
def timed_waits(monkeypatch):
    """Stop the clock of `exchange`, so that only waits for a socket use up a timeout, not a slow machine."""
    began = []

    def monotonic():
        began.append(time.monotonic())
        return began[0]

    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=monotonic))


@pytest.fixture
def scripted():
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.002})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Twin:
    """An `AsyncClient` with blocking methods, so that one synchronous test can run with both kinds of client."""

    def __init__(self, *args, **settings):
        self.client = flashpoint.AsyncClient(*args, **settings)
        self.loop = asyncio.new_event_loop()

    def __getattr__(self, name):
        method = getattr(self.client, name)
        return lambda *args, **keywords: self.loop.run_until_complete(method(*args, **keywords))

    def close(self):
        if not self.loop.is_closed():
            self.loop.run_until_complete(self.client.aclose())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())  # as asyncio.run does
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


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
    """Yield a factory of `RawServer` objects, which are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda talk, **how: stack.enter_context(RawServer(talk, **how))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Return the path of a PEM file with a self-signed certificate for `localhost` and its key."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    where = ["-addext", "subjectAltName=DNS:localhost", "-keyout", path, "-out", f"{path}.crt"]
    subprocess.run([*command.split(), *where], check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_name("localhost.pem.crt").read_text())
    return path


@pytest.fixture
def trusted(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


@pytest.fixture
def tls_server(certificate, trusted):
    """Return the SSLContext of a server whose certificate the clients trust."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def reach(connect):
    """Return a factory of clients like `connect`, with a `benchmark_run` that tests can call on both kinds of client.

    `AsyncClient.benchmark_run` is no coroutine function, so `Twin` must not run it in its event loop.
    """

    def reach(*args, **settings):
        client = connect(*args, **settings)
        if not isinstance(client, flashpoint.Client):
            client.benchmark_run = client.client.benchmark_run
        return client

    return reach


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Change to a folder with the module `my_kernels`, and return this folder."""
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def connected(server):
    from tests.support.jax_calls import Counted

    with Counted(server.url) as client:
        yield client


@pytest.fixture
def jax_client(connected):
    """Return the client of this module, after emptying `asked`, in which it records its calls."""
    connected.asked = ()
    return connected
