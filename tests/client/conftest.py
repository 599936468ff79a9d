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
    """Make clients keep idle connections, however much time a busy machine puts between two calls."""
    monkeypatch.setattr(transport, "IDLE_SECONDS", 3600.0)


@pytest.fixture
def delays(monkeypatch):
    """Record the seconds that the clients would wait before each retry, in order, without waiting."""
    waits = []

    async def sleep(delay):
        waits.append(delay)

    monkeypatch.setattr(_client, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(_async_client, "asyncio", SimpleNamespace(sleep=sleep))
    return waits


@pytest.fixture(autouse=True)
def default_width(monkeypatch):
    """Give tables their default width, whatever a test of another file has set."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys):
    """Return a function that runs a command and returns its exit code, stdout and stderr."""

    def run(*arguments):
        code = cli.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return run


class Clock:
    """A stand-in for the module `time`: the real time plus what a test adds."""

    time = staticmethod(time.time)

    def __init__(self):
        self._added = 0.0

    def monotonic(self):
        return time.monotonic() + self._added

    def advance(self, seconds):
        self._added += seconds


@pytest.fixture
def clock(monkeypatch):
    """Return `clock(*modules)`, which installs one `Clock` in these client modules and returns it."""

    def install(*modules):
        clock = Clock()
        for module in modules:
            monkeypatch.setattr(module, "time", clock)
        return clock

    return install


@pytest.fixture
def timed_waits(monkeypatch):
    """Count only the time that a call waits for a socket, so that a slow machine does not exceed a timeout."""
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
    """An `AsyncClient` for synchronous tests, so that each test runs with both clients."""

    def __init__(self, *args, **settings):
        self._client = flashpoint.AsyncClient(*args, **settings)
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **keywords: self._loop.run_until_complete(method(*args, **keywords))

    def close(self):
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._client.aclose())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())  # as asyncio.run does
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
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
    """Return a factory of `RawServer`s, which end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda talk, **how: stack.enter_context(RawServer(talk, **how))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Return the file of a self-signed certificate of `localhost`, with its key."""
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
    """Return the TLS settings of a server whose certificate the clients trust."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def reach(connect):
    """Return a factory of clients of either kind; `benchmark_run` needs no await."""

    def reach(*args, **settings):
        client = connect(*args, **settings)
        if not isinstance(client, flashpoint.Client):
            client.benchmark_run = client._client.benchmark_run
        return client

    return reach


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Return a folder with the module `my_kernels`, which is the current folder."""
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
    """Return a client that records its calls, with an empty record."""
    connected.asked = ()
    return connected
