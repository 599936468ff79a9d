"""Send requests on raw sockets, and find which memory, requests, caches and saved forwards a server still has."""

import socket
from pathlib import Path

from tests.support.messages import PATIENCE, SAFETENSORS, ask
from tests.support.servers import wait_for


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def connect(server, *, receive_buffer=None):
    """Connect to the server. `receive_buffer` is the size in bytes of the socket's receive buffer (SO_RCVBUF)."""
    connection = socket.socket()
    try:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", server.port))
    except BaseException:
        connection.close()
        raise
    return connection


def send(server, body, *, path="/attention", length=None, request_id=None, receive_buffer=None, **headers):
    """Send a request and return its connection; `length` is a Content-Length that differs from `body`'s."""
    connection = connect(server, receive_buffer=receive_buffer)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SAFETENSORS}\r\nConnection: close\r\n"
    if request_id is not None:
        head += f"X-Request-Id: {request_id}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    try:
        connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    except BaseException:
        connection.close()
        raise
    return connection


def read_all(connection):
    """Read until the server closes the connection, and return the body of the answer."""
    with connection, connection.makefile("rb") as file:
        return file.read().split(b"\r\n\r\n", 1)[1]


def segments(pid):
    """Return the inodes of the staging memory files that a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "flashpoint-staging" in line}


def nothing_inside(server):
    """Wait until no request is inside the server."""
    wait_for(lambda: server.get("/info")[1]["load"] == {"requests": 0, "bytes": 0}, lambda: "requests that never end")


def held_since(server, what="caches"):
    """Return a function that returns the ids of the caches (or `saved` forward passes) made after this call."""

    def ids():
        found, query = set(), ""
        while query is not None:
            page = ask(server, f"/{what}{query}").json
            found |= {one["id"] for one in page[what]}
            query = f"?after={page['next']}" if page.get("next") else None
        return found

    before = ids()
    return lambda: ids() - before
