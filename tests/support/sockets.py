"""Requests on raw sockets, and what a server holds afterwards."""

import socket
from pathlib import Path

from tests.support.messages import SAFETENSORS
from tests.support.servers import wait_for


def send(server, body, *, length=None):
    """A raw connection on which a request was sent, its body cut where `body` ends if `length` says more."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /attention HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\nConnection: close\r\n"
    try:
        connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    except BaseException:
        connection.close()
        raise
    return connection


def read_all(connection):
    """The body of the answer."""
    with connection, connection.makefile("rb") as file:
        return file.read().split(b"\r\n\r\n", 1)[1]


def segments(pid):
    """The staging memory files that a process maps, by inode."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "flashpoint-staging" in line}


def nothing_inside(server):
    wait_for(lambda: server.get("/info")[1]["load"] == {"requests": 0, "bytes": 0}, lambda: "work that never ends")
