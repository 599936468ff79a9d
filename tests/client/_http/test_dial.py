"""A client tries the addresses of a host, or of a proxy, one after another (Happy Eyeballs, RFC 8305)."""

import contextlib
import socket
import threading

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint._http import connection, dial, drive
from tests.support.framed import Q, echo
from tests.support.proxies import ProxyServer


@pytest.fixture
def silent():
    """Yield a factory of (host, port) that neither accepts nor refuses a connection, because its backlog is full."""
    with contextlib.ExitStack() as stack:

        def make():
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(8):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            return listener.getsockname()

        yield make


def refusing():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()


@pytest.fixture
def names(monkeypatch):
    """Return a function `names({host: [(address, port), …]})`, which sets the addresses that a host resolves to."""
    known, real = {}, socket.getaddrinfo

    def getaddrinfo(host, port, *args, **keywords):
        if host not in known:
            return real(host, port, *args, **keywords)
        addresses = known[host]
        if callable(addresses):
            return addresses()
        return [
            (socket.AF_INET6 if ":" in each[0] else socket.AF_INET, socket.SOCK_STREAM, 6, "", each)
            for each in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known.update


def test_a_silent_address_does_not_keep_the_next_one_from_being_tried(raw, connect, names, silent):
    server = raw(echo)
    names({"two.example": [silent(), silent(), ("127.0.0.1", server.port)]})
    client = connect(f"http://two.example:{server.port}", timeout=600, retries=0)
    assert np.array_equal(client.attention(Q, Q, Q), Q)


def test_a_refused_address_does_so_at_once(raw, connect, names, monkeypatch):
    monkeypatch.setattr(connection, "ATTEMPT_DELAY", 3600.0)
    server = raw(echo)
    names({"two.example": [refusing(), ("127.0.0.1", server.port)]})
    assert np.array_equal(connect(f"http://two.example:{server.port}").attention(Q, Q, Q), Q)


def test_over_tls_an_address_that_is_silent_after_it_accepted_does_not_either(
    raw, connect, names, tls_server, monkeypatch
):
    monkeypatch.setattr(connection, "SETUP_DELAY", 0.1)
    over = threading.Event()
    mute, server = raw(lambda connection: over.wait(60)), raw(echo, tls=tls_server)
    names({"localhost": [("127.0.0.1", mute.port), ("127.0.0.1", server.port)]})
    client = connect(server.url, timeout=600, retries=0)
    try:
        assert np.array_equal(client.attention(Q, Q, Q), Q)
    finally:
        over.set()


@pytest.mark.parametrize("scheme", ["http", "https", "socks5"])
def test_a_proxy_with_a_silent_address_does_not_either(
    scripted, connect, names, silent, monkeypatch, tls_server, scheme
):
    with ProxyServer(scheme, tls=tls_server if scheme == "https" else None) as proxy:
        names({"localhost": [silent(), ("127.0.0.1", proxy.port)]})
        monkeypatch.setenv("http_proxy", proxy.url)
        client = connect(scripted.url, timeout=600, retries=0)
        assert np.array_equal(client.attention(Q, Q, Q), Q)
        assert proxy.asked


def test_the_attempts_that_lost_are_closed(raw, connect, names, tls_server, monkeypatch):
    monkeypatch.setattr(connection, "SETUP_DELAY", 0.1)
    closed = threading.Event()

    def mute(connection):
        while connection.recv(1 << 16):
            pass
        closed.set()

    slow, server = raw(mute), raw(echo, tls=tls_server)
    names({"localhost": [("127.0.0.1", slow.port), ("127.0.0.1", server.port)]})
    connect(server.url, timeout=600).attention(Q, Q, Q)
    assert closed.wait(60)


def test_when_all_addresses_fail_each_error_is_named_once(connect, names):
    names({"two.example": [refusing(), refusing(), ("256.0.0.0", 1)]})
    with pytest.raises(flashpoint.ConnectionFailedError) as refused:
        connect("http://two.example:1", retries=0).attention(Q, Q, Q)
    assert str(refused.value).count("Connection refused") == 1


def test_all_silent_meets_the_timeout(connect, names, silent):
    names({"two.example": [silent(), silent()]})
    with pytest.raises(flashpoint.ConnectionFailedError, match="deadline passed before there was a connection"):
        connect("http://two.example:1", retries=0).attention(Q, Q, Q, timeout=0.6)


def test_a_resolver_that_is_silent_meets_the_timeout_and_calls_share_its_thread(connect, names):
    lookups, over = [], threading.Event()

    def never():
        lookups.append(1)
        over.wait(60)
        raise socket.gaierror(-2, "no such name")

    names({"slow.example": never})
    client = connect("http://slow.example:1", retries=0)
    try:
        for _ in range(3):
            with pytest.raises(flashpoint.ConnectionFailedError, match="deadline passed before there was a connection"):
                client.attention(Q, Q, Q, timeout=0.1)
        assert lookups == [1]
    finally:
        over.set()
        for thread in threading.enumerate():
            if thread.name == "flashpoint-resolver":  # otherwise a later test of this host shares its lookup
                thread.join(60)


@pytest.mark.parametrize("host", ["no.such.host.invalid", f"{'a' * 64}.example"])
def test_a_name_without_an_address_is_a_failed_connection(connect, names, host):
    def missing():
        raise socket.gaierror(-2, "Name or service not known")

    names({"no.such.host.invalid": missing})
    with pytest.raises(flashpoint.ConnectionFailedError, match="the connection to http"):
        connect(f"http://{host}:1", retries=0).attention(Q, Q, Q)


def test_families_take_turns(names):
    names({"five.example": [(host, 1) for host in ("::1", "::2", "::3", "127.0.0.1", "127.0.0.2")]})
    found = [each.address[0] for each in drive.run(dial.resolve("five.example", 1), None, httpx.ConnectTimeout)]
    assert found == ["::1", "127.0.0.1", "::2", "127.0.0.2", "::3"]
