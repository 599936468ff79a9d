"""Workers start with the last good keys and certificate; while none is alive, the supervisor answers 503."""

import contextlib
import hashlib
import http.client
import json
import os
import signal
import ssl
import threading

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from flashpoint.cli import main
from tests.support.authority import Authority
from tests.support.messages import PATIENCE
from tests.support.servers import wait_for


def workers(server):
    return set(server.children("cli.worker"))


@contextlib.contextmanager
def killed(server):
    """Kill each worker of a server as soon as it appears."""
    end = threading.Event()

    def kill():
        while not end.is_set():
            for pid in workers(server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            end.wait(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


KEY = "s3cret"


def asked(server, context, path="/health/live", body=None, key=KEY):
    """Return the status and the JSON of the answer to one call over TLS."""
    made = http.client.HTTPSConnection("localhost", server.port, timeout=PATIENCE, context=context)
    with contextlib.closing(made) as connection:
        connection.request("POST" if body else "GET", path, body, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("application/"), response.headers
        return response.status, json.loads(response.read())


@pytest.mark.slow
def test_workers_start_again_with_damaged_and_absent_files(start_server, tmp_path):
    """While none is alive, the supervisor answers 503, over TLS and with a body that still arrives."""
    authority = Authority(tmp_path)
    cert, tls_key = authority.give("server")
    keys = tmp_path / "keys.toml"
    good = f'[alice]\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\nrights = ["attention", "info"]\n'
    keys.write_text(good)
    server = start_server(ready=False, workers=2, api_keys_file=keys, tls_cert=cert, tls_key=tls_key)
    context = ssl.create_default_context(cafile=authority.file)

    def answered(path, key=KEY):
        try:
            return asked(server, context, path, key=key)[0]
        except (ConnectionError, ssl.SSLError):  # its worker was killed
            return None

    wait_for(lambda: answered("/health/ready") == 200, lambda: server.lines[-5:])
    before = workers(server)
    keys.write_text("[alice")
    server.wait_for_line(lambda line: line["event"] == "keys kept")
    cert.unlink()
    server.wait_for_line(lambda line: line["event"] == "certificate kept")
    with killed(server):
        wait_for(lambda: answered("/info") == 503, lambda: "the service never answers 503")
        for path in ("/info", "/attention", "/v2/models/attention/infer"):
            body = None if path == "/info" else bytes(1 << 20)  # it arrives beside the refusal
            wait_for(lambda p=path, b=body: refused(server, context, p, b), lambda p=path: p)
    wait_for(lambda: answered("/info") == 200, lambda: f"no worker starts: {server.lines[-5:]}")
    assert not before & workers(server)
    assert answered("/info", key="other") == 401
    assert main(["health", f"--port={server.port}", f"--tls-cert={cert}"]) == 0
    keys.write_text(good.replace("alice", "bob"))
    server.wait_for_line(lambda line: line["event"] == "keys loaded")


def refused(server, context, path, body):
    """Return whether a call gets 503 from the supervisor."""
    try:
        status, document = asked(server, context, path, body)
    except (ConnectionError, ssl.SSLError):
        return False
    return status == 503 and (document.get("code") == "not_ready" or "no HTTP process is alive" in document["error"])
