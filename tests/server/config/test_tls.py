"""HTTPS and gRPC over TLS work with real clients, client certificates and renewed server certificates."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import time

import grpc
import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch
from pydantic import ValidationError

import flashpoint
from flashpoint.cli import main
from flashpoint_server import Settings
from flashpoint_server.config import tls
from tests.support.authority import Authority
from tests.support.messages import SAFETENSORS, message, reply
from tests.support.servers import wait_for

Q = np.random.default_rng(0).standard_normal((1, 2, 5, 8), np.float32)
ROWS = 1 << 12


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


def tls_settings(authority):
    cert, key = authority.give("server")
    return {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.file}


@pytest.fixture(scope="module")
def server(start_server, authority):
    """Start a server that requires a client certificate and an API key, with timeouts of an hour for slow machines."""
    settings = {**tls_settings(authority), "api_keys": "s3cret"}
    server = start_server(ready=False, header_timeout=3600, body_timeout=3600, grpc_port=0, **settings)
    assert server.url.startswith("https://")
    with client(server, authority) as asking:
        wait_for(asking.ready, lambda: f"not ready: {server.lines}")
    return server


def trusting(authority, certificate=True):
    context = ssl.create_default_context(cafile=authority.file)
    if certificate:
        context.load_cert_chain(*authority.give("caller"))
    return context


def client(server, authority, kind=flashpoint.Client, **how):
    tls = trusting(authority, **how)
    return kind(f"https://localhost:{server.port}", api_key="s3cret", tls=tls, retries=0)


@contextlib.contextmanager
def connected(server, context):
    """Yield an `http.client` connection to the server over TLS."""
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=60, context=context)
    with contextlib.closing(connection):
        yield connection


def constant(value, rows=ROWS):
    """Return a request whose answer, 1 MiB for 1,024 rows, has `value` in all elements."""
    zeros = {name: torch.zeros(1, 4, n, 64) for name, n in (("q", rows), ("k", 1))}
    return message({**zeros, "v": torch.full((1, 4, 1, 64), float(value))})


HEADERS = {"Content-Type": SAFETENSORS, "Authorization": "Bearer s3cret"}


def test_both_clients_get_exact_answers_of_any_size(server, authority):
    with client(server, authority) as blocking:
        for rows in (1, 100, 3 * ROWS):  # the last request and answer are encrypted in several steps
            q = np.random.default_rng(rows).standard_normal((1, 1, rows, 256), np.float32)
            v = np.full((1, 1, 3, 256), rows, np.float32)
            assert np.array_equal(blocking.attention(q, v, v), np.full_like(q, rows))
        once = blocking.attention(Q, Q, Q, causal=True)

    async def both():
        async with client(server, authority, flashpoint.AsyncClient) as waiting:
            return await asyncio.gather(*(waiting.attention(Q, Q, Q, causal=True) for _ in range(4)))

    for o in asyncio.run(both()):
        assert np.array_equal(o, once)


def test_one_connection_serves_many_requests_of_a_stranger(server, authority):
    with connected(server, trusting(authority)) as connection:
        for value in range(5):
            chunks = iter([constant(value, 3)[i : i + 100] for i in range(0, len(constant(value, 3)), 100)])
            body = chunks if value % 2 else constant(value, 3)
            connection.request("POST", "/attention", body, HEADERS, encode_chunked=bool(value % 2))
            assert bool((reply(connection.getresponse()).tensors["o"] == value).all())
            connection.request("GET", "/health/live")
            assert reply(connection.getresponse()).json == {"status": "ok"}


def test_an_early_refusal_is_read(server, authority):
    with connected(server, trusting(authority)) as connection:
        body = constant(1, 8 * ROWS)
        connection.request("POST", "/attention", body, {**HEADERS, "Authorization": "Bearer wrong"})
        assert reply(connection.getresponse()).json["code"] == "unauthorized"


def ask(connection):
    connection.request("GET", "/health/live")
    return connection.getresponse().status


def test_who_shows_no_certificate_or_another_ones_is_sent_nothing(server, authority, tmp_path):
    stranger = trusting(authority, certificate=False)
    other = trusting(authority, certificate=False)
    other.load_cert_chain(*Authority(tmp_path).give("caller"))
    for context in (stranger, other):
        with connected(server, context) as connection, pytest.raises((ssl.SSLError, ConnectionError)):
            ask(connection)
    asks = pytest.raises(flashpoint.ConnectionFailedError, match="if it asks for a client certificate, give `tls`")
    with asks, client(server, authority, certificate=False) as asking:
        asking.attention(Q, Q, Q)


def test_neither_plain_http_nor_an_old_version_is_spoken(server, authority):
    with socket.create_connection(("localhost", server.port), timeout=60) as plain:
        plain.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)
    old = trusting(authority)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with connected(server, old) as connection, pytest.raises((ssl.SSLError, ConnectionError)):
        ask(connection)


def test_tls_1_2_has_forward_secrecy_and_authenticated_encryption(server, authority):
    """HTTP and gRPC refuse TLS cipher suites with CBC, and those without an ephemeral elliptic-curve key exchange."""

    def suite(port, ciphers):
        context = trusting(authority)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(f"{ciphers}@SECLEVEL=0")
        context.set_alpn_protocols(["h2"] if port == grpc_port(server) else ["http/1.1"])
        with (
            socket.create_connection(("localhost", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as encrypted,
        ):
            return encrypted.cipher()[0]

    for port in (server.port, grpc_port(server)):
        assert "GCM" in suite(port, "ECDHE+AESGCM")
        for weak in ("ECDHE+AES:!AESGCM:!AESCCM", "DHE", "kRSA"):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                suite(port, weak)


@pytest.mark.slow
def test_its_health_is_asked_for_through_tls(server, authority, capsys, start_server):
    """`flashpoint health` works over TLS. It has no client certificate and does not verify the server's certificate."""
    cert, key = authority.give("alive")
    files = [f"--tls-cert={cert}", f"--tls-key={key}", f"--tls-client-ca={authority.file}"]
    assert main(["health", f"--port={server.port}", *files]) == 0
    assert "handshake" in capsys.readouterr().out
    assert main(["health", f"--port={server.port}"]) == 1  # the server does not accept plain HTTP
    starting = start_server(ready=False, tls_cert=cert, tls_key=key)
    assert main(["health", f"--port={starting.port}", *files[:2]]) == 0
    assert "/health/live is 200" in capsys.readouterr().out
    starting.stop()
    assert main(["health", f"--port={starting.port}", *files]) == 1
    assert "no answer" in capsys.readouterr().err


def test_canary_slow_readers_see_nobody_elses_bytes(server, authority):
    """Slow readers get right answers, although other answers reuse memory while those of the slow readers wait.

    A waiting answer is already encrypted in part.
    """
    context = trusting(authority)
    with contextlib.ExitStack() as open_until:
        slow = []
        for value in range(1, 5):
            connection = open_until.enter_context(connected(server, context))
            connection.request("POST", "/attention", constant(value, 2 * ROWS), HEADERS)
            slow.append(connection)
        with connected(server, context) as connection:
            for value in range(20, 35):
                connection.request("POST", "/attention", constant(value, ROWS), HEADERS)
                assert bool((reply(connection.getresponse()).tensors["o"] == value).all())
        for value, connection in enumerate(slow, 1):
            assert bool((reply(connection.getresponse()).tensors["o"] == value).all())


SHORTER = 40  # seconds; without a timeout of ours, uvloop waits for 60, and gRPC for 120


def test_a_silent_handshake_and_a_head_that_never_ends_are_closed(start_server, authority):
    """tests/server/http/test_heads.py tests more heads without TLS."""
    server = start_server(ready=False, header_timeout=1, grpc_port=0, **tls_settings(authority))
    for port in (server.port, grpc_port(server)):
        with socket.create_connection(("127.0.0.1", port), timeout=SHORTER) as silent:
            assert silent.recv(1) == b""
    cut_off = (ConnectionError, ssl.SSLEOFError)  # on a slow machine, the timeout may expire during the handshake
    with connected(server, trusting(authority)) as connection, contextlib.suppress(*cut_off):
        connection.connect()
        connection.sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        assert connection.sock.recv(1) == b""


def grpc_port(server):
    return server.wait_for_line(lambda line: line["event"] == "listening for gRPC")["port"]


def test_grpc_asks_for_a_certificate_too(server, authority):
    def live(*shown):
        credentials = grpc.ssl_channel_credentials(authority.file.read_bytes(), *(file.read_bytes() for file in shown))
        with grpc.secure_channel(f"localhost:{grpc_port(server)}", credentials) as channel:
            return channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)

    cert, key = authority.give("caller")
    assert live(key, cert) == b"\x08\x01"  # protobuf for "live: true"
    with pytest.raises(grpc.RpcError) as refused:
        live()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def certificates_loaded(server):
    return len([line for line in server.lines if line["event"] == "certificate loaded"])


def end_of(file):
    """Return the Unix time at which a certificate ends, as openssl shows it, in whole days from now."""
    shown = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", file], capture_output=True, text=True)
    return round((ssl.cert_time_to_seconds(shown.stdout.strip().removeprefix("notAfter=")) - time.time()) / 86400)


def expiry_shown(server, authority):
    """Return the end of the certificate in the metrics, in whole days from now."""
    with connected(server, trusting(authority)) as connection:
        connection.request("GET", "/metrics", headers=HEADERS)
        text = connection.getresponse().read().decode()
    (value,) = re.findall(r"^flashpoint_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
    return round((float(value) - time.time()) / 86400)


@pytest.mark.parametrize("days", [1, 365 * 20, 365 * 40])  # from 2050 on, the date has four digits of the year
def test_the_first_end_of_a_chain_is_read(authority, days):
    cert, _ = authority.give(f"for-{days}", days=days)
    chain = cert.read_bytes() + authority.file.read_bytes()  # the authority's certificate is valid for two days
    shown = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", cert], capture_output=True, text=True)
    assert tls.expiry(cert.read_bytes()) == ssl.cert_time_to_seconds(shown.stdout.strip().removeprefix("notAfter="))
    assert tls.expiry(chain) == min(tls.expiry(cert.read_bytes()), tls.expiry(authority.file.read_bytes()))


def test_a_new_certificate_is_shown_after_sighup(server, authority):
    def shown():
        """Check that HTTP and gRPC have the same server certificate, and return its serial number."""
        with connected(server, trusting(authority)) as connection:
            connection.connect()
            serial = connection.sock.getpeercert()["serialNumber"]
        context = trusting(authority)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("localhost", grpc_port(server)), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as encrypted,
        ):
            assert encrypted.getpeercert()["serialNumber"] == serial
        return serial

    before = shown()
    cert, _ = authority.give("another")
    for wrong, why in ((b"nothing", "PEM"), (cert.read_bytes(), "mismatch")):  # not PEM; a certificate of another key
        (authority.where / "server.pem").write_bytes(wrong)
        server.process.send_signal(1)
        server.wait_for_line(lambda line, why=why: line["event"] == "certificate kept" and why in line["error"])
        assert shown() == before
    assert expiry_shown(server, authority) == end_of(cert.with_name("caller.pem"))  # all are valid for two days
    authority.give("server", days=30)
    server.process.send_signal(1)
    server.wait_for_line(lambda line: line["event"] == "certificate loaded")
    assert expiry_shown(server, authority) == end_of(authority.where / "server.pem")
    second = shown()
    assert second != before
    seen = certificates_loaded(server)
    authority.give("server")  # no signal: the files are watched
    wait_for(lambda: certificates_loaded(server) > seen and shown() != second, lambda: server.lines[-5:])
    assert "s3cret" not in json.dumps(server.lines)


@pytest.mark.parametrize("wrong", [{"tls_key": "ca.key"}, {"tls_cert": "nothing.pem"}, {"tls_client_ca": "ca.key"}])
def test_files_that_do_not_belong_together_are_refused(authority, wrong):
    cert, key = authority.give("mine")
    files = {"tls_cert": cert, "tls_key": key, **{name: authority.where / file for name, file in wrong.items()}}
    with pytest.raises(ValidationError, match="tls_cert"):
        Settings(**files)


def test_a_file_without_a_key_or_without_a_certificate_is_named(authority):
    cert, key = authority.give("mine")
    with pytest.raises(ValueError, match=re.escape(f"{cert} contains no private key; name its file with --tls-key")):
        tls.read(cert, None, None)
    with pytest.raises(ValueError, match=re.escape(f"{cert} contains no private key")):
        tls.read(cert, cert, None)
    with pytest.raises(ValueError, match=re.escape(f"{key} contains no certificate")):
        tls.read(key, cert, None)
