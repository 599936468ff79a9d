"""Proxies: a load balancer in Python, nginx and HAProxy as deploy/ configures them, and nginx and Varnish as caches."""

import contextlib
import http.client
import itertools
import os
import shutil
import socket
import subprocess
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.messages import PATIENCE
from tests.support.servers import wait_for

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
REPLICA = "X-Flashpoint-Replica"
NEEDED = ("nginx", "varnishd")  # .ci/run installs these


@contextlib.contextmanager
def balancer(choose):
    """Start an HTTP/1.1 proxy; `choose` maps the value of X-Flashpoint-Replica, or "" without it, to a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server = choose(self.headers.get(REPLICA, ""))
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)) as behind:
                behind.request(self.command, self.path, body, dict(self.headers.items()))
                answer = behind.getresponse()
                text = answer.read()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = _pass_on  # noqa: N815  # names of http.server

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            """Ignore a client that has disconnected."""

    with Server(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.002})
        thread.start()
        try:
            yield SimpleNamespace(port=proxy.server_port, url=f"http://127.0.0.1:{proxy.server_port}")
        finally:
            proxy.shutdown()
            thread.join()


def by_name(servers):
    """Return a `choose` that routes known replica names to their servers, and other names to each server in turn."""
    turns = itertools.cycle(servers.values())
    return lambda name: servers.get(name) or next(turns)


def by_hash(servers):
    """Return a `choose` that routes equal values of X-Flashpoint-Replica to the same server, chosen by their hash."""
    choices = list(servers.values())
    return lambda name: choices[zlib.crc32(name.encode()) % len(choices)]


def nginx(servers, folder):
    """Start nginx with deploy/nginx/flashpoint.conf."""
    return _nginx(folder, "flashpoint.conf", _configure("nginx/flashpoint.conf", servers, folder / "flashpoint.conf"))


def _nginx(folder, name, port):
    """Start nginx with the file `name` of `folder` as its part `http`."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    http = ["access_log off;", *(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)]
    http.append(f"include {folder}/{name};")
    user = "user root; " if os.geteuid() == 0 else ""  # another user could not write into `folder`
    (folder / "nginx.conf").write_text(f"{user}daemon off; pid {folder}/pid; events {{}} http {{ {' '.join(http)} }}")
    return _running(["nginx", "-e", "stderr", "-p", folder, "-c", folder / "nginx.conf"], port)


def caching_nginx(server, folder):
    """Start nginx as a cache of `server`, which stores every answer that its header fields allow for an hour."""
    port = _free_port()
    rules = f"proxy_cache seen; proxy_cache_valid any 1h; proxy_pass http://127.0.0.1:{server.port};"
    body = f"proxy_cache_path {folder}/seen keys_zone=seen:1m;"
    (folder / "cache.conf").write_text(f"{body} server {{ listen 127.0.0.1:{port}; location / {{ {rules} }} }}")
    return _nginx(folder, "cache.conf", port)


def varnish(server, folder):
    """Start Varnish with its default rules in front of `server`."""
    port = _free_port()
    places = ["-a", f"127.0.0.1:{port}", "-b", f"127.0.0.1:{server.port}", "-n", folder / "varnish"]
    return _running(["varnishd", "-F", "-j", "none", "-s", "malloc,16m", *places], port)


@contextlib.contextmanager
def haproxy(servers, folder):
    """Start HAProxy with deploy/haproxy/haproxy.cfg."""
    port = _configure("haproxy/haproxy.cfg", servers, folder / "haproxy.cfg")
    with _running(["haproxy", "-db", "-f", folder / "haproxy.cfg"], port) as address:
        yield address


def require(program):
    """Skip the test if a program is not on the PATH, in /usr/sbin or in /sbin. In CI, fail it without one of NEEDED."""
    if _path(program) is None:
        missing = f"{program} is not installed"
        (pytest.fail if os.environ.get("CI") and program in NEEDED else pytest.skip)(missing)


def _path(program):
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def _configure(name, servers, path):
    """Write a configuration of deploy/ to `path`, with the addresses of `servers` and a free port; return this port."""
    port = _free_port()
    text = (DEPLOY / name).read_text()
    for address, server in zip(("10.0.0.1:8000", "10.0.0.2:8000"), servers.values(), strict=True):
        assert address in text
        text = text.replace(address, f"127.0.0.1:{server.port}")
    assert "0.0.0.0:8080" in text
    path.write_text(text.replace("0.0.0.0:8080", f"127.0.0.1:{port}"))
    return port


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def _running(command, port):
    program, *arguments = map(str, command)
    with subprocess.Popen([_path(program), *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:

            def listens():
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    return True

            wait_for(listens, lambda: process.stderr.read(), stop=lambda: process.poll() is not None)
            yield SimpleNamespace(port=port, url=f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.communicate()
