"""HTTP written by hand, and what comes back until the connection ends."""

import contextlib
import http.client
import io
import socket

from tests.support.messages import reply
from tests.support.sockets import connect


class _Read:
    """The socket from which `http.client` reads an answer."""

    def __init__(self, file):
        self._file = file

    def makefile(self, *_):
        return self._file


class _Open(io.BytesIO):
    """Bytes that hold several answers: `http.client` closes its file after each."""

    def close(self):
        pass


def talk(server, sent, *, half=False):
    """Send bytes, and with `half` then end the sending; all that comes back until the server closes the connection."""
    with connect(server) as connection:
        connection.sendall(sent)
        if half:
            connection.shutdown(socket.SHUT_WR)
        return read_to_end(connection)


def read_to_end(connection):
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            found += piece
    return bytes(found)


def answers(found):
    """The answers in `found`, in order; those of interim statuses are skipped."""
    file, read = _Open(found), []
    while file.tell() < len(found):
        response = http.client.HTTPResponse(_Read(file))
        response.begin()
        read.append(reply(response))
    return read


def get(path, *fields, version="1.1", host="Host: localhost"):
    """A GET; `host` may be several lines, or none."""
    lines = [f"GET {path} HTTP/{version}", *([host] if host else []), *fields]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path, body, media, *fields, version="1.1"):
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Type: {media}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1") + body
