"""Calls work through HTTP, HTTPS and SOCKS5 proxies, and no message shows a proxy's credentials."""

import os

import numpy as np
import pytest

import flashpoint
from tests.support.framed import Q, echo, refusal
from tests.support.proxies import ProxyServer
from tests.support.raw_server import read_head, read_request
from tests.support.scripted_server import message


@pytest.mark.parametrize("proxy_scheme", ["http", "https", "socks5"])
@pytest.mark.parametrize("secure", [False, True])
def test_large_tensors_go_through_every_proxy(raw, connect, monkeypatch, tls_server, proxy_scheme, secure):
    big = np.arange(1 << 20, dtype=np.float32).reshape(1, 1, 1 << 18, 4)

    def talk(connection):
        while (body := read_request(connection)) is not None:
            o = np.frombuffer(body, np.float32, offset=8 + int.from_bytes(body[:8], "little"))[: big.size]
            data = message({"o": o.reshape(big.shape)})
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.safetensors\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(data) + data)

    server = raw(talk, tls=tls_server if secure else None)
    credentials = "me:pass%word"
    with ProxyServer(proxy_scheme, tls_server if proxy_scheme == "https" else None, credentials) as proxy:
        url = proxy.url.replace("pass%word", "pass%25word")
        monkeypatch.setenv("https_proxy" if secure else "http_proxy", url)
        client = connect(server.url)
        for _ in range(2):
            assert np.array_equal(client.attention(big, big[..., :1, :], big[..., :1, :]), big)
        assert len(proxy.asked) == 1  # the connection is reused
        assert server.opened == 1


@pytest.mark.parametrize("proxy_scheme", ["http", "https", "socks5"])
@pytest.mark.parametrize("secure", [False, True])
def test_a_proxy_that_refuses_is_named_without_its_credentials(
    raw, connect, monkeypatch, tls_server, proxy_scheme, secure
):
    server = raw(echo, tls=tls_server if secure else None)
    with ProxyServer(proxy_scheme, tls_server if proxy_scheme == "https" else None, "me:other") as proxy:
        url = proxy.url.replace("other", "S3cretPassword")
        monkeypatch.setenv("https_proxy" if secure else "http_proxy", url)
        with pytest.raises(flashpoint.FlashpointError) as refused:
            connect(server.url, retries=0).attention(Q, Q, Q)
    assert "S3cret" not in repr(refused.value) + str(refused.value)
    if proxy_scheme == "socks5":
        assert "refused the user and the password" in str(refused.value)
    else:
        assert isinstance(refused.value, flashpoint.AuthenticationError)
        assert "the proxy needs a user and a password" in str(refused.value)


@pytest.mark.parametrize("url", ["ftp://me:S3cret@h:1", "http://me:S3cret@h:port", "http://me:S3/cret@h"])
def test_a_proxy_that_cannot_be_used_is_refused_without_its_credentials(connect, monkeypatch, url):
    monkeypatch.setenv("http_proxy", url)
    with pytest.raises(flashpoint.InvalidInputError, match="proxy: must be a URL") as refused:
        connect("http://two.example")
    assert "S3" not in str(refused.value)


def test_the_proxy_is_not_asked_for_a_host_and_port_that_are_excepted(scripted, connect, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", scripted.url.removeprefix("http://"))
    assert np.array_equal(connect(scripted.url).attention(Q, Q, Q), Q)


@pytest.mark.parametrize("no_proxy", [False, True])
def test_a_proxy_of_the_environment_is_asked_unless_it_is_excepted(raw, scripted, connect, monkeypatch, no_proxy):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    requests = []

    def talk(connection):
        head, body, size = read_head(connection)
        while len(body) < size:
            body += connection.recv(1 << 16)
        requests.append(head.split(b" ")[1].decode())
        connection.sendall(refusal(b"403 Forbidden"))

    monkeypatch.setenv("http_proxy", raw(talk).url)
    monkeypatch.setenv("no_proxy", "127.0.0.1" if no_proxy else "")
    client = connect(scripted.url)
    if no_proxy:
        assert np.array_equal(client.attention(Q, Q, Q), Q)
    else:
        with pytest.raises(flashpoint.AuthenticationError):
            client.attention(Q, Q, Q)
    assert requests == ([] if no_proxy else [f"{scripted.url}/attention"])
